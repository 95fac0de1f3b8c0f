"""What is refused before a forward, and when a checkpoint is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from hflow.backends.hf_config import max_length
from hflow.backends.interface import NodeCall
from hflow.data.batch import Batch
from hflow.data.batch_arguments import column
from hflow.errors import BackendError, RunError


def check_sequences(model: str, config: PreTrainedConfig, batches: Iterable[Batch]) -> None:
    """Refuse sequences that a model has no positions or no embeddings for.

    Raises:
        BackendError: naming the length or the token.
    """
    longest, name = max_length(config), f"model {model!r}"
    for batch in (batch for batch in batches if len(batch)):
        num_tokens = int(batch.lengths.max())
        if longest is not None and num_tokens > longest:
            raise BackendError(
                f"a sequence has {num_tokens} tokens, but {name} has positions for {longest} "
                "(max_position_embeddings); leave out or shorten such rows"
            )
        token = int(np.max(column(batch, "input_ids").values))
        if token >= config.vocab_size:
            raise BackendError(
                f"a sequence holds token {token}, but {name} has a vocabulary of {config.vocab_size}; "
                "encode with the tokenizer that belongs to the model"
            )


def check_temperature(call: NodeCall) -> None:
    """Refuse a policy of temperature 0, under which nothing has a log-prob.

    Raises:
        RunError: naming the node.
    """
    if call.temperature <= 0:
        raise RunError(f"node {call.node!r}: log-probs need a generation temperature above 0")


def refuse_tensors(
    path: Path, missing: Iterable[str], unknown: Iterable[str], misshapen: Iterable[str]
) -> None:
    """Refuse a checkpoint by the names of tensors that are not as the model needs them.

    Raises:
        BackendError: when there is any such tensor.
    """
    for problem, names in (
        ("lacks", missing),
        ("has tensors that the model does not know:", unknown),
        ("has tensors of other shapes than its config says:", misshapen),
    ):
        if listed := sorted(names):
            raise BackendError(f"checkpoint {path} {problem} {_some(listed)}")


def _some(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
