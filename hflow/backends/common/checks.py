"""What is refused before a forward."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedConfig

from hflow.backends.architecture import max_length
from hflow.backends.base import Call
from hflow.data.batch import Batch
from hflow.data.binding import column
from hflow.errors import BackendError, RunError


def check_sequences(model: str, config: PreTrainedConfig, batches: Iterable[Batch]) -> None:
    """Refuse sequences that a model has no positions or no embeddings for.

    Raises:
        BackendError: naming the length or the token.
    """
    longest, name = max_length(config), f"model {model!r}"
    for batch in batches:
        num_tokens = int(batch.lengths.max(initial=0))
        if longest is not None and num_tokens > longest:
            raise BackendError(
                f"a sequence has {num_tokens} tokens, but {name} has positions for {longest} "
                "(max_position_embeddings); leave out or shorten such rows"
            )
        token = int(np.max(column(batch, "input_ids").values, initial=0))
        if token >= config.vocab_size:
            raise BackendError(
                f"a sequence holds token {token}, but {name} has a vocabulary of {config.vocab_size}; "
                "encode with the tokenizer that belongs to the model"
            )


def check_temperature(call: Call) -> None:
    """Refuse a policy of temperature 0, under which nothing has a log-prob.

    Raises:
        RunError: naming the node.
    """
    if call.temperature <= 0:
        raise RunError(f"node {call.node!r}: log-probs need a generation temperature above 0")
