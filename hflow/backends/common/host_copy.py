"""Copies of tensors in host memory, which later steps do not change."""

from __future__ import annotations

import torch
from torch import Tensor


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor in host memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
