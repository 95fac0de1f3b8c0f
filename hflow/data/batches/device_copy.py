"""Copies from host memory to a device which do not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor on a device: itself if it is there, else a copy of one in host memory.

    The copy goes through pinned memory, which torch reuses. A copy of other memory would wait until the
    device has done all earlier work, and so would one with gaps, which torch closes in other memory.
    """
    if x.device.type == torch.device(device).type:
        return x
    return x.contiguous().pin_memory().to(device, non_blocking=True)
