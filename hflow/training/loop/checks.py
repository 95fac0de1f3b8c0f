"""Checks of the samples before a forward pass, and of the tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from transformers import PreTrainedConfig

from hflow.base.errors import BackendError, RunError
from hflow.data.batches.batch import Batch
from hflow.data.batches.batch_arguments import get_column
from hflow.models.hf_config import max_length
from hflow.training.interface import NodeCall


def check_sequences(model: str, config: PreTrainedConfig, batches: Iterable[Batch]) -> None:
    """Check that a model has positions and embeddings for every sequence.

    Raises:
        BackendError: if a sequence is too long or has a token outside the vocabulary.
    """
    longest, name = max_length(config), f"model {model!r}"
    for batch in (batch for batch in batches if len(batch)):
        num_tokens = int(batch.lengths.max())
        if longest is not None and num_tokens > longest:
            raise BackendError(
                f"a sequence has {num_tokens} tokens, but {name} has positions for {longest} "
                "(max_position_embeddings); remove or shorten such rows"
            )
        token = int(np.max(get_column(batch, "input_ids").values))
        if token >= config.vocab_size:
            raise BackendError(
                f"a sequence holds token {token}, but {name} has a vocabulary of {config.vocab_size}; "
                "encode with the model's own tokenizer"
            )


def check_temperature(call: NodeCall) -> None:
    """Check that the policy samples: at temperature 0 log-probs are undefined.

    Raises:
        RunError: if the temperature is 0.
    """
    if call.temperature <= 0:
        raise RunError(
            f"node {call.node!r}: log-probs are undefined at temperature {call.temperature:g}; set a "
            "temperature above 0 on the generate node of its stream"
        )
