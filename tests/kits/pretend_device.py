"""A pretend accelerator: a device of torch that computes on the CPU, and on which mistakes of CUDA code fail.

Tensors on it have real memory, but torch takes this memory for that of another device. Every operation on
them comes to this module, which checks the arguments, runs the CPU kernel on the same memory, and moves the
results to the device. As on CUDA, it is an error

- to mix tensors of the device and of the CPU, except for a CPU scalar in a pointwise operation;
- to read a tensor as a numpy array without copying it to the CPU first;
- to use memory that was freed with `UntypedStorage.resize_(0)`.

An operation that would make the host wait for the device is recorded: see `host_syncs`. Copies of memory that
is not pinned count, as torch waits for them.

There is one such device in a process. Its streams do nothing, as every operation is complete when it returns.
The process groups of `PretendGroup` take tensors of the device, and as with NCCL no others.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
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
    return cpu.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())


def _pin(tensor: Tensor) -> Tensor:
    """Return a copy in memory that counts as pinned, as long as it exists."""
    return _mark_pinned(tensor.clone())


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
        _freed.discard(address)
    else:
        ctypes.memset(address, 0xFF, storage.nbytes())  # NaN in every float type
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

    if _recordings:
        _record_operation(name, args, kwargs)
    cpu_args = [
        torch.tensor(x) if isinstance(x, int | float) and str(given.type) == "Tensor" else _map(to_cpu, x)
        for x, given in zip(args, op._schema.arguments, strict=False)
    ]  # torch passes numbers as if they were tensors, which only its own kernels accept
    result = op(*cpu_args, **{key: _map(to_cpu, value) for key, value in kwargs.items()})
    for cpu, given in inputs.values():
        if cpu.shape != given.shape:  # an output that the kernel has resized
            given.set_(_to_device(cpu))
    if name == "_local_scalar_dense" or not op._schema.returns:
        return result
    return _map(to_device, result)


def _map(function: Callable[[Any], Any], values: Any) -> Any:
    """Apply a function to every value in tuples and lists."""
    if isinstance(values, tuple | list):
        return type(values)([_map(function, value) for value in values])
    return function(values)


def _check_mixed(op: Any, tensor: Tensor) -> None:
    """Refuse a tensor of the CPU as CUDA's kernels do: all but scalars in pointwise operations."""
    if tensor.dim() > 0 or torch.Tag.pointwise not in op.tags:
        raise RuntimeError(f"{op} got tensors of the device {NAME} and of {tensor.device}; move them to one")


def _record_operation(name: str, args: Any, kwargs: Any) -> None:
    """Record an operation whose result, or its shape, the host has to wait for."""
    if name in _SYNCS and kwargs.get("output_size") is None:
        _record(_SYNCS[name])
    if name in ("index", "index_put", "_index_put_impl_") and any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    ):
        _record("a boolean index")


def _on_cpu_keys(op: Any) -> Any:
    """Return a kernel that runs the CPU's one, which only computes with sizes and strides."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys, *args, **kwargs)

    return kernel


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return _to_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return _to_device(torch.empty_strided(size, stride, dtype=dtype))


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if not _is_here(target):
        if not (non_blocking and _is_pinned(target)):
            _record("copy to the host")
    elif not _is_here(source) and not (non_blocking and _is_pinned(source)):
        _record("copy to the device that is not pinned and non_blocking")
    (_to_cpu(target) if _is_here(target) else target).copy_(_to_cpu(source) if _is_here(source) else source)
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
    **_: Any,
) -> tuple[Tensor, ...]:
    assert is_causal, "hflow uses causal attention"
    assert not dropout, "hflow uses no dropout"
    given = [_to_cpu(x) for x in (q, k, v, query_starts, key_starts)]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out, sums = pretend_attention.forward(*given[:3], (given[3], given[4]), (max_q, max_k), factor)
    return (_to_device(out), _to_device(sums), *(torch.empty(0, device=NAME) for _ in range(3)))


def _flash_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *_: Any,
    scale: float | None = None,
    **__: Any,
) -> tuple[Tensor, ...]:
    given = [_to_cpu(x) for x in (gradient, q, k, v, query_starts, key_starts)]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    gradients = pretend_attention.backward(*given[:4], (given[4], given[5]), factor)
    return tuple(map(_to_device, gradients))


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

    def current_stream(self, device: object = None) -> _Stream:
        return _Stream()

    def stream(self, stream: object) -> AbstractContextManager[None]:
        return nullcontext()

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


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def record(self, stream: object = None) -> _Event:
        return self

    def wait(self, stream: object = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _record("synchronize")


class _Stream:
    """A stream without work."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        _record("synchronize")


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


def _collective(method: str) -> Callable[..., Any]:
    def run(group: PretendGroup, *args: Any) -> Any:
        work = getattr(group._gloo, method)(*(_map(_for_collective, value) for value in args))
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
