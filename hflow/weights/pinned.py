"""Copies of payloads in host memory."""

from __future__ import annotations

import torch
from torch import Tensor


def host_payload(payload: Tensor) -> Tensor:
    """Return a payload in host memory: itself if it is there, else a copy in pinned memory.

    torch reuses pinned memory, so only the first buckets pay for pinning it.
    """
    if payload.device.type == "cpu":
        return payload
    return torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True).copy_(payload)
