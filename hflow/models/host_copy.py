"""Payloads in host memory from which a GPU copies at full speed.

Copies of tensors in host memory, which later steps do not change.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from hflow.base.devices import is_gpu
from hflow.models.device import initialized_accelerator

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 64


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
        """Pin the memory, unless that was tried before. The GPU must be initialized."""
        if self._is_tried:
            return
        self._is_tried = True
        cudart = _runtime()
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
        if error := int(_runtime().cudaHostUnregister(self.bytes.data_ptr())):
            torch.cuda.check_error(error)


def _runtime() -> Any:
    """Return the functions of CUDA's runtime."""
    accelerator = initialized_accelerator()
    assert accelerator is not None, "memory is pinned for a GPU that this process uses"
    return accelerator.cudart()


def _forget_cuda_error() -> None:
    """Let a kernel report the last error of CUDA, which it would otherwise report in other code."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


@cache
def _warn(reason: str) -> None:
    """Warn once that copies are slow."""
    _LOG.warning("host memory is not pinned (%s), so copies between it and the GPU are slower", reason)


class HostCopies:
    """Copies of the same tensors, made now and then, such as those of a checkpoint until it is written.

    A GPU copies to pinned memory in the background. To pin memory takes longer than to copy to it, so it is
    kept for the next time, and freed with this object: copies made by then are overwritten. Where `pin` was
    called, a thread pins it before the first copies.
    """

    def __init__(self) -> None:
        self._kept: list[PinnableMemory] = []
        """Regions of memory, in the order in which copies fill them."""
        self._region = self._num_used = 0
        """The region that is being filled, and the bytes of it that are used."""
        self._thread: Thread | None = None
        weakref.finalize(self, _unpin, self._kept).atexit = False

    def pin(self, sizes: Iterable[int], source: torch.device) -> None:
        """Begin to pin memory on a thread, so that the first copies from a device do not wait for it.

        `sizes` are the bytes of these copies. Further ones pin memory when they are made.
        """
        num_bytes = sum(map(_aligned, sizes))
        if num_bytes and is_gpu(source.type):
            self._thread = Thread(
                target=_pin_ahead, args=(self._kept, num_bytes, source), name="hflow-pinning", daemon=True
            )
            self._thread.start()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Make copies inside; they are complete when this ends, and those made before are gone."""
        self._region = self._num_used = 0
        yield
        accelerator = initialized_accelerator()
        if (self._region or self._num_used) and accelerator is not None:
            accelerator.current_stream().synchronize()

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a contiguous copy in host memory, in a dtype or the tensor's own."""
        copied = self.empty(tensor.shape, dtype or tensor.dtype, tensor.device)
        return copied.copy_(tensor.detach(), non_blocking=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, source: torch.device) -> Tensor:
        """Return host memory for what will be copied from a device."""
        if not is_gpu(source.type):
            return torch.empty(shape, dtype=dtype)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        num_bytes = math.prod(shape) * dtype.itemsize
        start = self._place(max(1, num_bytes))
        return self._kept[self._region].bytes[start:][:num_bytes].view(dtype).view(tuple(shape))

    def _place(self, num_bytes: int) -> int:
        """Reserve the next bytes in the region that is being filled; return their start."""
        kept = self._kept
        if self._num_used and self._num_used + num_bytes > kept[self._region].bytes.nbytes:
            self._region, self._num_used = self._region + 1, 0
        if self._region == len(kept):
            kept.append(_pinned(num_bytes))
        elif self._num_used + num_bytes > kept[self._region].bytes.nbytes:
            kept[self._region].unpin()
            kept[self._region] = _pinned(num_bytes)
        start, self._num_used = self._num_used, self._num_used + _aligned(num_bytes)
        return start


def _aligned(num_bytes: int) -> int:
    """Return the bytes that a copy takes: the next one begins where any dtype can."""
    return -(-max(1, num_bytes) // _ALIGNMENT) * _ALIGNMENT


def _pin_ahead(kept: list[PinnableMemory], num_bytes: int, source: torch.device) -> None:
    if (accelerator := initialized_accelerator()) is not None:
        accelerator.set_device(source)  # of this thread
    kept.append(_pinned(num_bytes))


def _pinned(num_bytes: int) -> PinnableMemory:
    """Return memory on pages of its own, of which CUDA pins each only once."""
    memory = PinnableMemory(torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8))
    memory.pin()
    return memory


def _unpin(kept: Sequence[PinnableMemory]) -> None:
    for memory in kept:
        memory.unpin()
