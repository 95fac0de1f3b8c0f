"""Buckets in the memory of a GPU, opened by another process on the same GPU (CUDA IPC)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from hflow.errors import RunError
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


class IpcChannel(WeightChannel):
    """Lets the receiver read the sender's packed bucket, without a copy."""

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._payloads: dict[int, Tensor] = {}
        """Address -> payload that receivers may read."""

    def send(self, receivers: Receivers, bucket: Bucket) -> Any:
        """Keep the bucket on its GPU.

        Raises:
            RunError: when it is not on a GPU.
        """
        payload = bucket.payload
        if payload.device.type != "cuda":
            raise RunError("ipc needs weights on a GPU; set models.NAME.gen.transport=shared")
        torch.cuda.synchronize(payload.device)  # the receiver's stream does not know what packs the bucket
        rebuild, arguments = reduce_tensor(payload)
        self._payloads[payload.data_ptr()] = payload
        return DeviceBucket(_device_id(payload.device.index), rebuild, arguments, bucket.header)

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

    def free(self, handles: Iterable[Any]) -> None:
        """Drop all payloads: one publication is pending at most."""
        self._payloads.clear()
        torch.cuda.ipc_collect()  # torch keeps what a receiver has opened until it is asked again

    def close(self) -> None:
        """Drop all payloads."""
        self._payloads.clear()


_DEVICE_ARGUMENT = 6
"""Place of the device in the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`."""


def _device_id(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


Channel = IpcChannel
