"""Payloads in host memory from which a GPU copies at full speed."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


def host_payload(payload: Tensor) -> Tensor:
    """Return a payload in host memory: itself if it is there, else a copy in pinned memory.

    torch reuses pinned memory, so only the first buckets pay for pinning it.
    """
    if payload.device.type == "cpu":
        return payload
    return torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True).copy_(payload)


class PinnableMemory:
    """Host memory that torch has not allocated, pinned where CUDA allows that.

    Where it does not, copies between it and a GPU are slower.

    Attributes:
        bytes: the memory.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self._is_tried = False
        self._is_pinned = False

    def pin(self) -> None:
        """Pin the memory, unless that was tried before. CUDA must be initialized."""
        if self._is_tried:
            return
        self._is_tried = True
        cudart: Any = torch.cuda.cudart()
        error = cudart.cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0)
        self._is_pinned = int(error) == 0
        if not self._is_pinned:
            _forget_cuda_error()
            _warn(cudart.cudaGetErrorString(error))

    def unpin(self) -> None:
        """Unpin the memory if it is pinned, before it is unmapped."""
        if not self._is_pinned:
            return
        self._is_pinned = False
        cudart: Any = torch.cuda.cudart()
        if error := int(cudart.cudaHostUnregister(self.bytes.data_ptr())):
            torch.cuda.check_error(error)


def _forget_cuda_error() -> None:
    """Let a kernel report the last error of CUDA, which it would otherwise report in other code."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


@cache
def _warn(reason: str) -> None:
    """Warn once that copies are slow."""
    _LOG.warning("host memory is not pinned (%s), so copies between it and the GPU are slower", reason)
