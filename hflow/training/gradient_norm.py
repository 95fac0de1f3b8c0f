"""The norm of a gradient whose parts are on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import get_total_norm

from hflow.data.batches.device_copy import to_device


def total_norm(
    gradients: Sequence[Tensor], device: torch.device, group: ProcessGroup | None, num_copies: int = 1
) -> float:
    """Return the L2 norm of a whole gradient; a collective.

    The norms of this rank's tensors are computed together, by a few kernels on a GPU, and summed over the
    ranks in one all-reduce. The host waits once.

    Args:
        gradients: this rank's parts, in fp32; there may be none.
        num_copies: number of ranks that have each part.
    """
    # Without any gradient the norm is on the CPU, which NCCL cannot reduce.
    square = to_device(get_total_norm(gradients), device).square()
    if group is not None:
        dist.all_reduce(square, group=group)
    return (square / num_copies).sqrt().item()  # waits: once per update
