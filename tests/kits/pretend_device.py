"""A pretend accelerator: a device of torch that computes on the CPU, and on which mistakes of CUDA code fail.

Tensors on it have real memory, but torch takes this memory for that of another device. Every operation on
them comes to this module, which checks the arguments, runs the CPU kernel on the same memory, and moves the
results to the device. As on CUDA, it is an error

- to mix tensors of the device and of the CPU, except for a CPU scalar in a pointwise operation;
- to read a tensor as a numpy array without copying it to the CPU first;
- to use memory that was freed with `UntypedStorage.resize_(0)`;
- to allocate more than `Memory.limit` inside of `memory()`.

An operation that would make the host wait for the device is recorded: see `host_syncs`. Copies of memory that
is not pinned count, as torch waits for them.

There is one such device in a process. Every operation is complete when it returns, and streams do nothing,
except inside of `deferred()`: there each stream does its work as late as it may, when the host or another
stream waits for it, and before all that this one has to do. Results have no values until then. So a stream
that reads what another one writes, without an event, reads wrong values. Memory that is freed while a stream
other than its own has work with it is overwritten by its own stream at once: the next tensor could be there.

The process groups of `PretendGroup` take tensors of the device, and as with NCCL no others.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pretend_attention
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
"""Name of the device, as in `torch.device("pretend")`."""

_PACKAGE = str(Path(__file__).parents[2] / "hflow")
_CPU = torch.device("cpu")
_DLPACK_EXTENSION = 12
"""`kDLExtDev` of DLPack, which torch imports as its device for extensions."""
_SYNCS = {
    "_local_scalar_dense": "item",
    "equal": "equal",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "unique_consecutive": "unique",
    "_unique2": "unique",
    "unique_dim": "unique",
    "repeat_interleave": "repeat_interleave without output_size",
    "bincount": "bincount",
}
"""Operations whose result, or its shape, the host has to wait for."""


_VIEWS = (
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "alias",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
"""Operations that compute sizes and strides alone."""


@dataclass(frozen=True)
class HostSync:
    """One wait of the host for the device."""

    kind: str
    place: str
    """`file:line` of the innermost frame of hflow; empty in a backward pass, which has none."""


_recordings: list[list[HostSync]] = []
_pinned: set[int] = set()
"""Addresses of storages that torch has pinned."""
_registered: set[int] = set()
"""Addresses of storages that the device's runtime has pinned."""
_ALREADY_REGISTERED = 712
"""`cudaErrorHostMemoryAlreadyRegistered`."""
_freed: set[int] = set()
"""Addresses of storages whose memory is free."""
_owners: dict[int, tuple[torch.UntypedStorage, _Stream]] = {}
"""Address -> the memory of a tensor on the device, and the stream that it was made on."""
_counted: dict[int, Memory] = {}
"""Address of a storage whose bytes count -> where."""
_notes: list[Callable[[torch.UntypedStorage], None]] = []
"""Functions that are called with all memory that is allocated."""
_streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
_is_deferred = False
_here = threading.local()


@contextmanager
def host_syncs() -> Iterator[list[HostSync]]:
    """Record every wait of the host for the device, on any thread."""
    recording: list[HostSync] = []
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.remove(recording)


def _record(kind: str) -> None:
    if not _recordings:
        return
    frame, place = sys._getframe(1), ""
    while frame is not None and not place:
        if (name := frame.f_code.co_filename).startswith(_PACKAGE):
            place = f"{Path(name).relative_to(Path(_PACKAGE).parent)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    for recording in _recordings:
        recording.append(HostSync(kind, place))


# ------------------------------------------------------------------------------- memory
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _to_device(tensor: Tensor) -> Tensor:
    """Return a tensor of the device with the memory of a CPU tensor, which it keeps."""
    if not tensor.numel():  # it has no memory; DLPack would make its strides contiguous
        tensor = torch.empty(1, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
    capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
    address = _pointer_of(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value = _DLPACK_EXTENSION
    moved: Tensor = torch.utils.dlpack.from_dlpack(capsule)
    if _memory is not None:
        _count(_memory, moved.untyped_storage())
    storage = moved.untyped_storage()
    for note in _notes:
        note(storage)
    if storage.nbytes():
        _owners[storage.data_ptr()] = tensor.untyped_storage(), _current_stream()
        weakref.finalize(storage, _free, storage.data_ptr()).atexit = False
    return moved


def _to_cpu(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with the memory of a tensor of the device. It does not keep the memory."""
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if address in _freed:
        raise RuntimeError(f"this memory of the device {NAME} is free")
    if not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(address, _CPU, size)
    cpu = torch.empty(0, dtype=tensor.dtype)
    cpu.owner = _owners[address]  # type: ignore[attr-defined]  # deferred work needs it after the tensor
    return cpu.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _free(address: int) -> None:
    """Overwrite freed memory on its own stream, at once if another stream still has work with it."""
    memory, own = _owners.pop(address)
    if any(stream is not own and stream.uses(address) for stream in tuple(_streams)):
        own.give(partial(_overwrite, memory))
        own.run()


def _overwrite(memory: torch.UntypedStorage) -> None:
    """Fill memory, which exists as long as the work that does so, with NaN in every float type."""
    ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes())


# ------------------------------------------------------------------------- allocated bytes
@contextmanager
def allocations(note: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call a function with all memory that is allocated inside."""
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)


@dataclass
class Memory:
    """What is allocated on the device of what was made inside of `memory()`."""

    num_bytes: int = 0
    most: int = 0
    limit: int | None = None
    """An allocation beyond it fails."""

    def add(self, num_bytes: int) -> None:
        with _memory_lock:
            if self.limit is not None and self.num_bytes + num_bytes > self.limit:
                raise torch.OutOfMemoryError(
                    f"{self.num_bytes} bytes of {self.limit} are allocated, which leaves no {num_bytes}"
                )
            self.num_bytes += num_bytes
            self.most = max(self.most, self.num_bytes)


_memory: Memory | None = None
_memory_lock = threading.RLock()


@contextmanager
def memory() -> Iterator[Memory]:
    """Count the bytes on the device of all tensors that are made inside."""
    global _memory
    _memory = Memory()
    try:
        yield _memory
    finally:
        _memory = None


def _count(counted: Memory, storage: torch.UntypedStorage) -> None:
    """Count the bytes of a storage until it is gone; while they are free, `_resize` has taken them off."""
    address, size = storage.data_ptr(), storage.nbytes()
    counted.add(size)
    _counted[address] = counted

    def take_off() -> None:
        counted.num_bytes -= 0 if _counted.pop(address, None) is None else size

    weakref.finalize(storage, take_off).atexit = False


# ----------------------------------------------------------------------------- streams
@contextmanager
def deferred() -> Iterator[None]:
    """Let streams do their work as late as they may. What is left after an error is dropped."""
    global _is_deferred
    _is_deferred = True
    try:
        yield
        for stream in tuple(_streams):
            stream.run()
    finally:
        for stream in tuple(_streams):
            stream.drop()
        _is_deferred = False


class _Event:
    """An event, which has happened when the work is done that was given to a stream before."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._stream, self._num_before = _DEFAULT_STREAM, 0

    def record(self, stream: _Stream | None = None) -> _Event:
        self._stream = stream or _current_stream()
        self._num_before = self._stream.num_given
        return self

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or _current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return whether it has happened. It happens before the host asks again."""
        if self._stream.num_done >= self._num_before:
            return True
        self.happen()
        return False

    def happen(self) -> None:
        """Do the work before it."""
        self._stream.run(self._num_before)

    def synchronize(self) -> None:
        _record("synchronize")
        self.happen()


class _Stream:
    """Work that is done in the order in which it was given."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.num_given = self.num_done = self._num_wanted = 0
        self._is_running = False
        self._work: deque[tuple[Callable[[], Any], frozenset[int], _Event | None]] = deque()
        self._lock = threading.RLock()
        _streams.add(self)

    def give(
        self, work: Callable[[], Any], addresses: Iterable[int] = (), event: _Event | None = None
    ) -> None:
        """Do work later, or now if nothing is deferred.

        Args:
            work: what to do.
            addresses: the memory that it reads or writes.
            event: the event that the work is to wait for.
        """
        mode = torch.is_inference_mode_enabled()

        def do() -> None:
            with torch.inference_mode(mode):
                work()

        with self._lock:
            self._work.append((do, frozenset(addresses), event))
            self.num_given += 1
        if not _is_deferred:
            self.run()

    def run(self, num: int | None = None) -> None:
        """Do all work, or only until so many pieces of it are done, after all work that these wait for.

        A piece that frees memory may call this; then the call that does this piece does the rest.
        """
        with self._lock:
            last = self.num_given if num is None else num
            if self._is_running:
                self._num_wanted = max(self._num_wanted, last)
                return
            for _, _, event in tuple(self._work)[: max(0, last - self.num_done)]:
                if event is not None:
                    event.happen()
            while self.num_done < max(last, self._num_wanted):
                self._is_running = True
                try:
                    self._work[0][0]()
                finally:
                    self._is_running = False
                    self._work.popleft()
                    self.num_done += 1

    def drop(self) -> None:
        """Do nothing of what is left."""
        with self._lock:
            self._work.clear()
            self.num_done = self._num_wanted = self.num_given

    def uses(self, address: int) -> bool:
        """Return whether work that is not done reads or writes memory."""
        return any(address in addresses for _, addresses, _ in tuple(self._work))

    def wait_event(self, event: _Event) -> None:
        self.give(event.happen, event=event)

    def wait_stream(self, stream: _Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: _Event | None = None) -> _Event:
        return (event or _Event()).record(self)

    def synchronize(self) -> None:
        _record("synchronize")
        self.run()


_DEFAULT_STREAM = _Stream()


def _current_stream() -> _Stream:
    """Return this thread's stream."""
    return getattr(_here, "stream", _DEFAULT_STREAM)


@contextmanager
def _on_stream(stream: _Stream | None) -> Iterator[None]:
    before = _current_stream()
    _here.stream = stream or before
    try:
        yield
    finally:
        _here.stream = before


def _addresses(*tensors: Tensor) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors]


def _pin(tensor: Tensor) -> Tensor:
    """Return a copy in memory that counts as pinned, as long as it exists. Gaps remain, as in torch's."""
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return _mark_pinned(copied.copy_(tensor))


def _mark_pinned(tensor: Tensor) -> Tensor:
    """Count the memory of a CPU tensor as pinned, as long as it exists."""
    address = tensor.untyped_storage().data_ptr()
    _pinned.add(address)
    weakref.finalize(tensor.untyped_storage(), _pinned.discard, address)
    return tensor


def pinned_by_address() -> frozenset[int]:
    """Return the addresses of memory that the device's runtime has pinned and not unpinned."""
    return frozenset(_registered)


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes tensors, and can pin them although torch has no allocator for it."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = make(*args, **kwargs)
        if not pin_memory:
            return tensor
        assert tensor.device == _CPU, "only memory of the CPU can be pinned"
        return _mark_pinned(tensor)

    return made


_resize_storage = torch.UntypedStorage.resize_


def _resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Mark memory of the device as free, or as allocated again, where its content is undefined."""
    if storage.device.type != NAME:
        return _resize_storage(storage, size)
    address = storage.data_ptr()
    if size:
        if address in _freed and _memory is not None:
            _count(_memory, storage)
        _freed.discard(address)
    elif address not in _freed:
        if (counted := _counted.pop(address, None)) is not None:
            counted.num_bytes -= storage.nbytes()
        _current_stream().give(partial(_overwrite, _owners[address][0]))  # after what it was given before
        _freed.add(address)
        weakref.finalize(storage, _freed.discard, address)
    return storage


def _size(storage: torch.UntypedStorage) -> int:
    """Return the bytes of a storage; 0 if they are free."""
    is_free = storage.device.type == NAME and storage.data_ptr() in _freed
    return 0 if is_free else storage.nbytes()


# ------------------------------------------------------------------------------ kernels
def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU and move its results to the device."""
    name = op._schema.name.removeprefix("aten::")
    inputs: dict[int, tuple[Tensor, Tensor]] = {}

    def to_cpu(x: Any) -> Any:
        if isinstance(x, torch.device) and x.type == NAME:
            return torch.device("cpu")
        if not isinstance(x, Tensor):
            return x
        if not _is_here(x):
            _check_mixed(op, x)
            return x
        cpu = _to_cpu(x)
        inputs[id(cpu)] = cpu, x
        return cpu

    def to_device(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in inputs:
            return inputs[id(x)][1]
        address = x.untyped_storage().data_ptr()
        for cpu, _ in inputs.values():
            assert not address or cpu.untyped_storage().data_ptr() != address, f"{op} returns a view"
        return _to_device(x)

    waited_for = _waited_for(name, args, kwargs)
    if waited_for is not None:
        _record(waited_for)
    args = tuple(
        torch.tensor(x) if isinstance(x, int | float) and str(given.type) == "Tensor" else x
        for x, given in zip(args, op._schema.arguments, strict=False)
    )  # torch passes numbers as if they were tensors, which only its own kernels accept
    cpu_args = [_map(to_cpu, x) for x in args]
    cpu_kwargs = {key: _map(to_cpu, value) for key, value in kwargs.items()}
    if _is_deferred:
        if waited_for is None and torch.Tag.nondeterministic_seeded not in op.tags:
            outputs = _empty_outputs(op, args, kwargs)
            if outputs is not None:
                return _defer(op, cpu_args, cpu_kwargs, outputs, [cpu for cpu, _ in inputs.values()])
        _current_stream().run()
    result = op(*cpu_args, **cpu_kwargs)
    for cpu, given in inputs.values():
        if cpu.shape != given.shape:  # an output that the kernel has resized
            given.set_(_to_device(cpu))
    if name == "_local_scalar_dense" or not op._schema.returns:
        return result
    return _map(to_device, result)


def _empty_outputs(op: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's results, without values where they are new; None if it has to run first."""
    given: dict[int, Tensor] = {}

    def to_meta(x: Any) -> Any:
        if isinstance(x, torch.device) and x.type == NAME:
            return torch.device("meta")
        if not isinstance(x, Tensor):
            return x
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        given[id(meta)] = x
        metas.append(meta)
        return meta

    def to_device(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) in given:
            return given[id(x)]
        return _empty_strided(x.shape, x.stride(), dtype=x.dtype)

    metas: list[Tensor] = []
    try:
        result = op(*(_map(to_meta, x) for x in args), **{key: _map(to_meta, x) for key, x in kwargs.items()})
    except (NotImplementedError, RuntimeError):
        return None
    if any(meta.shape != given[id(meta)].shape for meta in metas):  # an output that the kernel resizes
        return None
    return _map(to_device, result)


def _defer(op: Any, args: list[Any], kwargs: dict[str, Any], outputs: Any, inputs: list[Tensor]) -> Any:
    """Give the current stream an operation on CPU tensors, whose results are written to outputs."""
    made: list[Tensor | None] = []
    given = set(_addresses(*inputs))

    def place(x: Any) -> None:
        is_new = isinstance(x, Tensor) and _is_here(x) and x.untyped_storage().data_ptr() not in given
        made.append(_to_cpu(x) if is_new else None)

    def run() -> None:
        results: list[Any] = []
        _map(results.append, op(*args, **kwargs))
        for target, result in zip(made, results, strict=True):
            if target is not None:
                target.copy_(result)

    _map(place, outputs)
    _current_stream().give(run, _addresses(*inputs, *(x for x in made if x is not None)))
    return outputs


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to every value in tuples and lists."""
    if isinstance(values, tuple | list):
        return type(values)([_map(function, value) for value in values])
    return function(values)


def _check_mixed(op: Any, tensor: Tensor) -> None:
    """Refuse a tensor of the CPU as CUDA's kernels do: all but scalars in pointwise operations."""
    if tensor.dim() > 0 or torch.Tag.pointwise not in op.tags:
        raise RuntimeError(f"{op} got tensors of the device {NAME} and of {tensor.device}; move them to one")


def _waited_for(name: str, args: Any, kwargs: Any) -> str | None:
    """Return the kind of an operation whose result, or its shape, the host has to wait for; else None."""
    if name in _SYNCS and kwargs.get("output_size") is None:
        return _SYNCS[name]
    if name in ("index", "index_put", "_index_put_impl_") and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    ):
        return "a boolean index"
    return None


def _on_cpu_keys(op: Any) -> Any:
    """Return a kernel that runs the CPU's one, which only computes with sizes and strides."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys, *args, **kwargs)

    return kernel


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    return _to_device(_without_values(made))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _to_device(_without_values(torch.empty_strided(size, stride, dtype=dtype)))


def _without_values(tensor: Tensor) -> Tensor:
    """Fill a tensor that deferred work has to write with NaN, or -1."""
    if _is_deferred and tensor.numel():
        ctypes.memset(tensor.data_ptr(), 0xFF, tensor.untyped_storage().nbytes())
    return tensor


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    is_waited_for = True
    if not _is_here(target):
        is_waited_for = not (non_blocking and _is_pinned(target))
        if is_waited_for:
            _record("copy to the host")
    elif not _is_here(source):
        has_gaps = not source.is_contiguous() and source.stride() != target.stride()
        is_waited_for = has_gaps or not (non_blocking and _is_pinned(source))
        if is_waited_for:
            _record("copy to the device that is not pinned, contiguous and non_blocking")
    else:
        is_waited_for = False
    to, given = (_to_cpu(x) if _is_here(x) else x for x in (target, source))
    stream = _current_stream()
    stream.give(lambda: to.copy_(given), _addresses(to, given))
    if is_waited_for:
        stream.run()
    return target


def _set_storage(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Give a tensor all of a storage."""
    return tensor.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def _flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int,
    window_size_right: int,
    **_: Any,
) -> tuple[Tensor, ...]:
    assert window_size_right == 0, "hflow uses causal attention"
    assert is_causal == (window_size_left < 0), "as `varlen_attn` calls it"
    assert not dropout, "hflow uses no dropout"
    _current_stream().run()
    *qkv, first, second = (_to_cpu(x) for x in (q, k, v, query_starts, key_starts))
    pretend_attention.check_flash(*qkv, (first, second), (max_q, max_k))
    options = _scale(q, scale), None if is_causal else window_size_left + 1
    out, sums = pretend_attention.forward(*qkv, (first, second), *options)
    return (_to_device(out), _to_device(sums), *(torch.empty(0, device=NAME) for _ in range(3)))


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_q: int,
    max_k: int,
    dropout: float,
    is_causal: bool,
    *_: Any,
    scale: float | None = None,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    _current_stream().run()
    *given, first, second = (_to_cpu(x) for x in (gradient, q, k, v, out, sums, query_starts, key_starts))
    options = _scale(q, scale), None if is_causal else window_size_left + 1
    return tuple(map(_to_device, pretend_attention.backward(*given, (first, second), *options)))


def _efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
    scale: float | None = None,
    window_size: int | None = None,
    **_: Any,
) -> tuple[Any, ...]:
    """Attention of `[S, L, H, d]`, with sums `[S, H, L]` that are filled up to a multiple of 32."""
    *unused, dropout, mask, returns_sums = options  # torch leaves out what is the default
    assert unused == [None] * 5
    assert (dropout, mask, returns_sums) == (0.0, 2, True), "from the end of the keys"
    assert q.shape[2] == k.shape[2], "it groups no queries"
    _current_stream().run()
    rows = [_to_cpu(x).flatten(0, 1) for x in (q, k, v)]
    out, sums = pretend_attention.forward(*rows, _equal_starts(q, k), _scale(q, scale), window_size)
    sums = sums.unflatten(1, q.shape[:2]).transpose(0, 1)
    filled = torch.nn.functional.pad(sums, (0, -q.shape[1] % 32), value=torch.inf)
    of_dropout = (torch.empty(0, dtype=torch.int64, device=NAME) for _ in range(2))
    return _to_device(out.view(q.shape)), _to_device(filled), *of_dropout, q.shape[1], k.shape[1]


def _efficient_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    out: Tensor,
    query_starts: None,
    key_starts: None,
    max_q: int,
    max_k: int,
    sums: Tensor,
    *_: Any,
    scale: float | None = None,
    window_size: int | None = None,
    **__: Any,
) -> tuple[Tensor, ...]:
    assert out.is_contiguous(), "its places are computed from its shape"
    assert sums.shape == (q.shape[0], q.shape[2], -(-q.shape[1] // 32) * 32)
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    _current_stream().run()
    rows = [_to_cpu(x).flatten(0, 1) for x in (gradient, q, k, v, out)]
    of_rows = _to_cpu(sums)[..., :max_q].transpose(0, 1).flatten(1, 2)
    gradients = pretend_attention.backward(*rows, of_rows, _equal_starts(q, k), _scale(q, scale), window_size)
    shaped = (_to_device(g.view(x.shape)) for g, x in zip(gradients, (q, k, v), strict=True))
    return *shaped, torch.empty(0, device=NAME)


def _equal_starts(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    steps = torch.arange(len(q) + 1)
    return steps * q.shape[1], steps * k.shape[1]


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned | _registered


class _Module:
    """The device's module, `torch.pretend`."""

    num_emptied = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def set_device(self, device: object) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: object = None) -> None:
        """Record that the host waits for the device."""
        _record("synchronize")
        for stream in tuple(_streams):
            stream.run()

    def current_stream(self, device: object = None) -> _Stream:
        return _current_stream()

    def stream(self, stream: _Stream | None) -> AbstractContextManager[None]:
        return _on_stream(stream)

    def empty_cache(self) -> None:
        """Count the call: nothing is kept."""
        self.num_emptied += 1

    def cudart(self) -> _Runtime:
        return _Runtime()

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers are the CPU generator's."""


class _Runtime:
    """The functions of CUDA's runtime that pin memory. Each page can be pinned once."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if address in _registered:
            return _ALREADY_REGISTERED
        _registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        _registered.remove(address)
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return "already registered"


_Module.Stream, _Module.Event = _Stream, _Event  # type: ignore[attr-defined]


# -------------------------------------------------------------------------- collectives
_COLLECTIVES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
} | {
    name: name
    for name in (
        *("_allgather_base", "_reduce_scatter_base", "alltoall_base", "alltoall", "allgather", "allreduce"),
        *("broadcast", "gather", "recv", "reduce", "reduce_scatter", "scatter", "send"),
    )
}
"""Method of a process group -> that of gloo."""


class PretendGroup(dist.ProcessGroup):
    """Collectives of tensors of the device, which gloo makes. Like NCCL's, they take no others."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group, which its own class does not get."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes, by which torch chooses where objects are sent from."""
        return [torch.device(NAME)]

    def _get_backend(self, device: torch.device) -> Any:
        """Return gloo, whose options are those of the group."""
        return self._gloo

    def barrier(self, *args: Any, **options: Any) -> Any:
        return self._gloo.barrier()


class _Work:
    """A collective that the current stream makes later."""

    def __init__(self, group: PretendGroup, method: str, args: list[Any]) -> None:
        tensors: list[Tensor] = []
        _map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, args)
        make = getattr(group._gloo, method)
        self._stream = _current_stream()
        self._stream.give(lambda: make(*args).wait(), _addresses(*tensors))
        self._made = self._stream.record_event()

    def wait(self) -> None:
        """Let the current stream wait."""
        if _current_stream() is not self._stream:
            self._made.wait()


def _collective(method: str) -> Callable[..., Any]:
    def run(group: PretendGroup, *args: Any) -> Any:
        given = [_map(_for_collective, value) for value in args]
        if _is_deferred:
            return _Work(group, method, given)
        work = getattr(group._gloo, method)(*given)
        if method not in ("send", "recv"):
            work.wait()
        return work

    return run


def _for_collective(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not _is_here(value):
        raise RuntimeError(f"a collective of the device {NAME} got a tensor of {value.device}")
    return _to_cpu(value)


def _coalesced(method: str) -> Callable[..., Any]:
    """Return a method that makes the collective of one pair of tensors after the other."""

    def run(group: PretendGroup, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> Any:
        works = [getattr(group, method)(*pair, *options) for pair in zip(outputs, inputs, strict=True)]
        return works[-1]

    return run


for _name, _method in _COLLECTIVES.items():
    setattr(PretendGroup, _name, _collective(_method))
for _name in ("reduce_scatter_single", "all_gather_single"):
    setattr(PretendGroup, f"{_name}_coalesced", _coalesced(_name))


_libraries: list[torch.library.Library] = []


@contextmanager
def installed() -> Iterator[str]:
    """Make the device known to torch, for the rest of the process; yield its name.

    Modules that move to the device keep their parameter objects meanwhile, as on CUDA.
    """
    _install()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield NAME
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _install() -> None:
    if _libraries:
        return
    _setup_privateuseone_for_python_backend(NAME, _Module())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_run, "PrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    made = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy,
        "set_.source_Storage": _set_storage,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_backward": _flash_backward,
        "_efficient_attention_forward": _efficient_forward,
        "_efficient_attention_backward": _efficient_backward,
    }
    for name, kernel in made.items():
        kernels.impl(name, kernel, "PrivateUse1")
    for name in _VIEWS:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernels.impl(name, _on_cpu_keys(op), "PrivateUse1")
    dist.Backend.register_backend(NAME, PretendGroup, devices=[NAME])
    torch.UntypedStorage.size = _size  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    torch.Tensor.pin_memory = _pin  # type: ignore[method-assign,assignment]
    _device_constructors()  # `with torch.device(...)` keeps torch's own functions, which those here call
    for name in ("empty", "empty_like", "zeros"):
        setattr(torch, name, _pinning(getattr(torch, name)))
    _libraries.extend((fallback, kernels))
