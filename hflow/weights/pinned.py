"""Payloads in host memory from which a GPU copies at full speed."""

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


def pin(memory: Tensor) -> None:
    """Pin host memory that torch has not allocated. Call `unpin` before it is unmapped."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    torch.cuda.check_error(int(error))


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    error = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
    torch.cuda.check_error(int(error))
