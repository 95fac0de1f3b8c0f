"""Keeps weights, the optimizer's state and activations of a model in host memory while nothing uses them.

A tensor that is offloaded stays the same object, and so does everything that shares its storage: views,
tied weights, the shards of FSDP2 and the buffers of megatron. Only the memory of its storage on the device
is freed.

Copies of weights and states run on the current CUDA stream, to and from pinned memory. Kernels that are
launched later on that stream see the values, so the host waits for nothing. Activations have a stream of
their own, as the computation continues meanwhile.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from hflow.base.devices import is_gpu
from hflow.config.schema import Offload

CHUNK_BYTES = 64 << 20
"""Host memory is allocated in chunks of this size. torch rounds pinned memory up to a power of two, so that
allocations of other sizes would waste up to half of it."""

MAX_LEAVING = 2
"""Saved activations whose memory on the device waits for their copy to the host. The computation waits for
the others, so that inputs of layers do not pile up where copies are slower than layers."""

Tensors = Callable[[], Iterable[Tensor]]
"""Returns tensors that are on the device. It is called before they are offloaded."""


def activations_in_host_memory(enabled: bool) -> AbstractContextManager[Any]:
    """Have what autograd saves, while the context is open, in host memory until the backward pass uses it.

    Recomputed layers save their inputs and nothing else. On GPUs, copies run on a stream of their own: the
    input of a layer leaves while the next ones compute, and returns while the layer above it does.
    """
    if not enabled:
        return nullcontext()
    saved = _SavedTensors()
    return saved_tensors_hooks(saved.to_host, saved.to_device)


class _SavedTensors:
    """What autograd saves in one forward pass, in host memory."""

    def __init__(self) -> None:
        self._last: _HostTensor | None = None

    def to_host(self, x: Tensor) -> _HostTensor | Tensor:
        """Start copying a tensor to the host."""
        if not is_gpu(x.device.type):
            return x.clone()
        self._last = _HostTensor(_copies_of(x.device), x, self._last)
        return self._last

    def to_device(self, saved: _HostTensor | Tensor) -> Tensor:
        """Return a tensor on its device, and start copying the one that was saved before it."""
        return saved if isinstance(saved, Tensor) else saved.take()


class _HostTensor:
    """A tensor in host memory that returns to its device.

    The device's memory of a tensor is freed on the stream of the computation, which has waited for the copy
    by then. Neither stream reuses memory that the other one still reads or writes.
    """

    def __init__(self, copies: _Copies, x: Tensor, before: _HostTensor | None) -> None:
        """Start copying a tensor to the host; `before` was saved before it, and is thus needed after it."""
        self._copies, self._before = copies, before
        self._buffer = copies.take_buffer(x.nbytes)
        self._host = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        self._device = x.device
        self._on_device: Tensor | None = x.detach()  # keeps the memory, even if x is emptied
        self._copied = copies.copy(self._host, x)
        copies.limit_leaving(self)

    def take(self) -> Tensor:
        """Return the tensor on the device; the computation waits for its copy."""
        self._return()
        x = self._on_device
        assert x is not None
        self.release()
        if self._before is not None:
            self._before._return()
            self._before = None
        return x

    def _return(self) -> None:
        """Start copying to the device, unless the tensor is there or on its way."""
        if self._on_device is None:
            self._on_device = torch.empty_like(self._host, device=self._device)
            self._copied = self._copies.copy(self._on_device, self._host)

    def release(self) -> None:
        """Have the computation wait for the copy, and drop the tensor on the device."""
        self._copies.current_stream.wait_event(self._copied)
        self._on_device = None

    def __del__(self) -> None:
        """Give the host memory back. Later copies into it are on the stream of those out of it."""
        if self._on_device is not None:
            self.release()
        self._copies.give_buffer(self._buffer)


class _Copies:
    """Copies of activations between one device and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device.type)
        self._stream = self._module.Stream()
        self._leaving: deque[weakref.ref[_HostTensor]] = deque()
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        """Bytes of a buffer -> those that nothing uses. Pinning new memory stops the device."""

    @property
    def current_stream(self) -> Any:
        """The stream of the computation."""
        return self._module.current_stream()

    def copy(self, to: Tensor, source: Tensor) -> Any:
        """Copy what the computation has made so far; return the event of the copy's end."""
        self._stream.wait_stream(self.current_stream)
        with self._module.stream(self._stream):
            to.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def limit_leaving(self, newest: _HostTensor) -> None:
        """Free the memory of tensors on the device, except for the newest ones, which are being copied."""
        self._leaving.append(weakref.ref(newest))
        while len(self._leaving) > MAX_LEAVING:
            if (oldest := self._leaving.popleft()()) is not None:
                oldest.release()

    def take_buffer(self, num_bytes: int) -> Tensor:
        """Return pinned memory of at least some bytes: a power of two, as torch rounds it up to that."""
        size = 1 << max(num_bytes - 1, 0).bit_length()
        return (
            self._free[size].pop()
            if self._free[size]
            else torch.empty(size, dtype=torch.uint8, pin_memory=True)
        )

    def give_buffer(self, buffer: Tensor) -> None:
        """Take back what `take_buffer` returned."""
        self._free[len(buffer)].append(buffer)


@cache
def _copies_of(device: torch.device) -> _Copies:
    """Return the copies of a device, which all models of this process share."""
    return _Copies(device)


class HostOffload:
    """Moves the state of one model between its device and host memory.

    Args:
        offload: what is in host memory while nothing uses it.
        optimizer: what only training and saving use, such as moments and master weights.
        gradients: buffers of gradients that exist between steps. Their values are not kept.
        base: another model's, whose weights this one uses as well.
    """

    def __init__(
        self,
        offload: Offload,
        weights: Tensors,
        optimizer: Tensors = tuple,
        gradients: Tensors = tuple,
        base: HostOffload | None = None,
    ) -> None:
        self._base, nothing = base, _Part(tuple)
        self._weights = _Part(weights) if offload == "all" else nothing
        is_training_offloaded = offload in ("optimizer", "all")
        self._optimizer = _Part(optimizer) if is_training_offloaded else nothing
        self._gradients = _Part(gradients, keeps_values=False) if is_training_offloaded else nothing

    @contextmanager
    def on_device(self, *, training: bool = False, changes: bool = False) -> Iterator[None]:
        """Have the weights on the device while the context is open; contexts may be nested.

        After an error everything stays on the device.

        Args:
            training: also the optimizer's state and gradients.
            changes: whether values may change. Those that do not change are not copied back.
        """
        with ExitStack() as parts:
            if self._base is not None:
                parts.enter_context(self._base.on_device())
            if training:
                parts.enter_context(self._gradients.on_device(changes))
                parts.enter_context(self._optimizer.on_device(changes))
            parts.enter_context(self._weights.on_device(changes))
            yield

    def start(self) -> None:
        """Offload everything, after the model has been built."""
        for part in (self._weights, self._optimizer, self._gradients):
            part.unload()

    @property
    def has_weights_on_device(self) -> bool:
        """Whether weights can be used."""
        return self._weights.is_on_device


class _Part:
    """Tensors that are offloaded together; without `keeps_values`, their values are then undefined."""

    def __init__(self, tensors: Tensors, keeps_values: bool = True) -> None:
        self._tensors = tensors
        self._keeps_values = keeps_values
        self._offloaded: dict[int, _OffloadedStorage] = {}
        """Address of a storage object -> the storage, from the first time that it is offloaded."""
        self._chunks = _Chunks()
        self._num_users = 0
        self._has_changed = True
        self.is_on_device = True

    @contextmanager
    def on_device(self, changes: bool) -> Iterator[None]:
        if not self.is_on_device:
            self._load()
        self._has_changed |= changes
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
        if not self._num_users:
            self.unload()

    @torch.no_grad()
    def unload(self) -> None:
        """Copy the values that have changed, and free the memory on the device."""
        storages = {storage._cdata: storage for storage in _storages(self._tensors())}
        if not storages:
            return
        known, self._offloaded = self._offloaded, {}
        for key, storage in storages.items():
            self._offloaded[key] = known.get(key) or self._new(storage)
            if self._keeps_values and (self._has_changed or key not in known):
                self._offloaded[key].save()
            storage.resize_(0)
        self._has_changed = False
        self.is_on_device = False
        for kind in {storage.device.type for storage in storages.values() if is_gpu(storage.device.type)}:
            torch.get_device_module(kind).empty_cache()  # an engine in another process may need the memory

    def _new(self, storage: UntypedStorage) -> _OffloadedStorage:
        num_bytes, is_pinned = storage.nbytes(), is_gpu(storage.device.type)
        pieces = self._chunks.add(num_bytes, is_pinned) if self._keeps_values else ()
        return _OffloadedStorage(storage, num_bytes, pieces)

    @torch.no_grad()
    def _load(self) -> None:
        for offloaded in self._offloaded.values():
            offloaded.restore()
        self.is_on_device = True


@dataclass(frozen=True)
class _OffloadedStorage:
    """The memory of one or more tensors on the device, and the host memory for its values."""

    storage: UntypedStorage
    num_bytes: int
    pieces: tuple[Tensor, ...]
    """Host memory, uint8; empty: the values are not kept."""

    def save(self) -> None:
        """Copy the values to the host."""
        for piece, part in self._pairs():
            piece.copy_(part, non_blocking=True)

    def restore(self) -> None:
        """Allocate the memory on the device, and copy the values back."""
        self.storage.resize_(self.num_bytes)
        for piece, part in self._pairs():
            part.copy_(piece, non_blocking=True)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pieces, each with the part of the memory on the device that it belongs to."""
        on_device = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        start = 0
        for piece in self.pieces:
            yield piece, on_device[start : start + len(piece)]
            start += len(piece)


class _Chunks:
    """Host memory that grows by chunks, and is freed with the model."""

    def __init__(self) -> None:
        self._free: Tensor | None = None
        """What is left of the last chunk."""

    def add(self, num_bytes: int, is_pinned: bool) -> tuple[Tensor, ...]:
        """Return pieces of memory that together have some bytes."""
        pieces: list[Tensor] = []
        while num_bytes:
            if self._free is None or not len(self._free):
                self._free = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            piece, self._free = self._free[:num_bytes], self._free[num_bytes:]
            pieces.append(piece)
            num_bytes -= len(piece)
        return tuple(pieces)


def _storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield the storages of tensors that have any memory; some may come several times."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            yield storage
