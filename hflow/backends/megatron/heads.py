"""How the last stage's hidden states reach its head, and the head's part of the vocabulary.

The head runs on the rows that a node asks for only, so the model returns hidden states and not logits.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

PADDED = -1e30
"""Logit of a vocabulary entry that is padding: its probability is 0, and 0 times it is 0, not nan."""


def enter_vocabulary(hidden: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Hidden states `[U', 1, D]` of all tokens on all tensor ranks.

    Each rank's gradient is of its part of the vocabulary only; the backward pass sums them.
    """
    if sequence_parallel:
        gathered: Tensor = gather_from_sequence_parallel_region(hidden, group=tp_group)
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(hidden, group=tp_group)
    return copied


def enter_scalar(hidden: Tensor, tp_group: ProcessGroup, sequence_parallel: bool) -> Tensor:
    """Hidden states `[U', 1, D]` of all tokens on all tensor ranks, which all compute the whole head.

    Each rank's gradient is the whole one already.
    """
    if not sequence_parallel:
        return hidden
    gathered: Tensor = gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False, group=tp_group
    )
    return gathered


def part_of_logits(rows: Tensor, weight: Tensor, num_valid: int) -> Tensor:
    """Logits `[N, V' / T]` of hidden states `[N, D]` that have entered the vocabulary.

    Args:
        rows: hidden states.
        weight: this rank's rows of the output matrix, `[V' / T, D]`.
        num_valid: how many of them are no padding.
    """
    logits = linear(rows, weight)
    if num_valid < len(weight):
        logits[:, num_valid:] = PADDED
    return logits
