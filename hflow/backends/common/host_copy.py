"""Copies of tensors in host memory, which later steps do not change."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hflow.weights.pinned import PinnableMemory


class HostCopies:
    """Copies of the same tensors, made now and then, such as those of a checkpoint until it is written.

    A GPU copies to pinned memory in the background. To pin memory takes longer than to copy to it, so it is
    kept for the next time, and freed with this object: copies made by then are overwritten.
    """

    def __init__(self) -> None:
        self._kept: list[PinnableMemory] = []
        """Memory of each tensor from a GPU, in the order of the copies."""
        self._num_used = 0
        weakref.finalize(self, _unpin, self._kept).atexit = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Make copies inside; they are complete when this ends, and those made before are gone."""
        self._num_used = 0
        yield
        if self._num_used:
            torch.cuda.current_stream().synchronize()

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a contiguous copy in host memory, in a dtype or the tensor's own."""
        copied = self.empty(tensor.shape, dtype or tensor.dtype, tensor.device)
        return copied.copy_(tensor.detach(), non_blocking=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, source: torch.device) -> Tensor:
        """Return host memory for what will be copied from a device."""
        if not _is_pinned_for(source):
            return torch.empty(shape, dtype=dtype)
        num_bytes = max(1, math.prod(shape) * dtype.itemsize)
        index, self._num_used = self._num_used, self._num_used + 1
        if index == len(self._kept):
            self._kept.append(_pinned(num_bytes))
        elif self._kept[index].bytes.nbytes != num_bytes:
            self._kept[index].unpin()
            self._kept[index] = _pinned(num_bytes)
        memory = self._kept[index].bytes
        return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _is_pinned_for(source: torch.device) -> bool:
    return source.type == "cuda"


def _pinned(num_bytes: int) -> PinnableMemory:
    """Return memory on pages of its own, of which CUDA pins each only once."""
    memory = PinnableMemory(torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8))
    memory.pin()
    return memory


def _unpin(kept: Sequence[PinnableMemory]) -> None:
    for memory in kept:
        memory.unpin()
