"""Buckets in the memory of a GPU, opened by another process on the same GPU (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from typing_extensions import override

from hflow.base.devices import has_cuda_api
from hflow.base.errors import RunError
from hflow.planner.weights.weight_slices import Receivers
from hflow.weights.buckets import Bucket, BucketHeader
from hflow.weights.channels.interface import ChannelSettings, WeightChannel


class DeviceBucket(NamedTuple):
    """A bucket in the memory of a GPU."""

    device: str
    """Unique id of the GPU."""
    rebuild: Callable[..., Tensor]
    """Opens the payload, given the arguments."""
    arguments: tuple[Any, ...]
    header: BucketHeader


class _Counter(NamedTuple):
    """The counter of a payload's reference by a receiver."""

    file: bytes
    """Shared memory with the counter, which torch sets to 1 when a payload is shared."""
    place: int


class IpcChannel(WeightChannel):
    """Lets the receiver read the sender's packed bucket, without a copy.

    A receiver's process takes its reference back when it has dropped what it opened. torch keeps the memory
    until then, so for ever where the process ended before, or never opened the bucket. The sender therefore
    takes the reference back itself when it frees a bucket, which no receiver reads any more.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._shared: dict[_Counter, Tensor] = {}
        """Payloads that receivers may read."""

    @override
    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Keep the bucket on its GPU.

        Raises:
            RunError: when it is not on a GPU.
        """
        payload = bucket.payload
        if not has_cuda_api(payload.device.type):
            raise RunError("ipc needs weights on a GPU; set models.NAME.gen.transport=shared")
        torch.cuda.synchronize(payload.device)  # the receiver's stream does not know what packs the bucket
        rebuild, arguments = reduce_tensor(payload)
        self._shared[_counter(arguments)] = payload
        return DeviceBucket(_device_id(payload.device.index), rebuild, arguments, bucket.header)

    @override
    def receive(self, handle: Any, receiver: int) -> Bucket:
        """Open the bucket.

        Raises:
            RunError: when it is on another GPU.
        """
        assert isinstance(handle, DeviceBucket)
        device = torch.cuda.current_device()
        if _device_id(device) != handle.device:
            raise RunError(
                "ipc needs trainer and engine on one GPU, but weights are on another one; "
                "set models.NAME.gen.transport=shared"
            )
        arguments = list(handle.arguments)
        arguments[_DEVICE_ARGUMENT] = device  # the sender may number its GPUs in another way
        return handle.header.with_payload(handle.rebuild(*arguments))

    @override
    def free(self, handles: Iterable[Any]) -> None:
        """Free the payloads."""
        self._release([_counter(handle.arguments) for handle in handles])

    @override
    def close(self) -> None:
        self._release(list(self._shared))

    def _release(self, counters: Iterable[_Counter]) -> None:
        for counter in counters:
            del self._shared[counter]
            # A counter below 0, if the receiver takes its reference back too, means the same as 0.
            torch.UntypedStorage._release_ipc_counter_cuda(*counter)


_ARGUMENTS = tuple(signature(rebuild_cuda_tensor).parameters)
_DEVICE_ARGUMENT = _ARGUMENTS.index("storage_device")
"""Place of the device among the arguments of torch's function that opens a payload."""
_COUNTER_FILE = _ARGUMENTS.index("ref_counter_handle")
_COUNTER_PLACE = _ARGUMENTS.index("ref_counter_offset")


def _counter(arguments: tuple[Any, ...]) -> _Counter:
    return _Counter(arguments[_COUNTER_FILE], arguments[_COUNTER_PLACE])


def _device_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
