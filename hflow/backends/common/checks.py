"""Checks of the samples before a forward pass, and of the tensors in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedConfig

from hflow.backends.hf_config import max_length
from hflow.backends.interface import NodeCall
from hflow.base.errors import BackendError, RunError
from hflow.data.batch import Batch
from hflow.data.batch_arguments import get_column


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


def check_tensors(
    path: Path, missing: Iterable[str], unknown: Iterable[str], misshapen: Iterable[str]
) -> None:
    """Check that a checkpoint has exactly the model's tensors.

    Args:
        path: the checkpoint.
        missing: tensors of the model that the checkpoint lacks.
        unknown: tensors of the checkpoint that the model lacks.
        misshapen: tensors whose shapes differ.

    Raises:
        BackendError: if there is any such tensor; names the first ones.
    """
    for problem, names in (
        ("lacks", missing),
        ("has tensors that the model does not know:", unknown),
        ("has tensors of other shapes than its config says:", misshapen),
    ):
        if listed := sorted(names):
            raise BackendError(
                f"checkpoint {path} {problem} {_first_names(listed)}; use weights that match its config.json"
            )


def _first_names(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
