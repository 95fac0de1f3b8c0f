"""Copies from host memory to a device which do not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of host memory on a device: itself on the CPU, else a copy.

    The copy goes through pinned memory, which torch reuses. A copy of other memory would wait until the
    device has done all earlier work.
    """
    if torch.device(device).type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)
