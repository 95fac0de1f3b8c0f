"""Weights on their way into an engine: `IncomingWeights` of one rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from hflow.base.devices import is_gpu
from hflow.types.tensor_slices import BUCKET_BYTES, MAX_BUCKETS
from hflow.weights.buckets import (
    IncomingTensor,
    SliceValues,
    StorageOf,
    assemble_tensors,
    unpack_bucket,
    verify_bucket,
    whole_slices,
)
from hflow.weights.channels import open_channel
from hflow.weights.channels.interface import ChannelSettings, NearHandle
from hflow.weights.checksum import MODULUS
from hflow.weights.delta import delta_receiver
from hflow.weights.handover import HandedOver

Handles = Sequence[Any] | HandedOver
"""What a channel's `send` returned for the buckets of one stream, in order."""


class IncomingWeights:
    """The weights of one version that one rank of an engine receives, tensor by tensor.

    It can be pickled and iterated in another process, such as the rank's own, if `local` can. The receiving
    end of the channel opens when the iteration starts, and remains open for later versions. Iterate only
    once.

    Args:
        channel: carries the buckets; None: all weights are local.
        receiver: the worker of the rank.
        device: `cpu` or `cuda`, where tensors are assembled; `cuda` is the current device of the process
            that iterates.
        streams: the handles of each stream that has this rank among its receivers, in the plan's order.
        local: called for the slices that this process holds itself, in the order of the tensors.
    """

    def __init__(
        self,
        channel: ChannelSettings | None,
        receiver: int = 0,
        device: str = "cpu",
        streams: Sequence[Handles] = (),
        local: Callable[[], Iterable[SliceValues]] | None = None,
    ) -> None:
        self._channel = channel
        self._receiver = receiver
        self._device = device
        self._streams = streams
        self._local = local
        self.num_bytes = 0
        """Bytes that were received so far."""
        self.checksum = 0
        """The checksum of all slices as they arrived; complete when the iteration has ended."""
        self.local_checksum = 0
        """The checksum of the slices that this process holds; complete when the iteration has ended."""
        self.storage: StorageOf | None = None
        """Returns an engine's own tensors, to assemble slices in; set in the process that iterates."""

    @classmethod
    def of_tensors(cls, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> IncomingWeights:
        """Return whole tensors of this process, `(HF name, tensor)`, as incoming weights.

        `tensors` is called when the iteration starts.
        """
        return cls(None, local=lambda: (SliceValues.of(*one) for one in whole_slices(tensors())))

    def __iter__(self) -> Iterator[IncomingTensor]:
        """Yield each tensor with the boxes of it that arrived.

        While a tensor is being loaded, the next ones are received, verified and assembled on a thread. Local
        weights may need collectives, so without streams everything happens on the caller's thread.

        Raises:
            RunError: when a slice is missing, or has other values than were sent.
        """
        if not self._streams:
            return assemble_tensors([self._local_slices()], self.storage)
        device = torch.device(self._device)
        if is_gpu(device.type):
            device = torch.device(device.type, torch.get_device_module(device).current_device())
        return prefetched(self._received(device), lambda arrived: arrived.tensor.nbytes, BUCKET_BYTES)

    def _received(self, device: torch.device) -> Iterator[IncomingTensor]:
        # The thread uses the caller's stream, so that the tensors are complete when they are loaded.
        accelerator: Any = torch.get_device_module(device) if is_gpu(device.type) else None
        stream = None if accelerator is None else accelerator.current_stream(device)

        def assemble() -> Iterator[IncomingTensor]:
            with nullcontext() if stream is None else accelerator.stream(stream):
                streams = [self._slices(handles, device) for handles in self._streams]
                yield from assemble_tensors([*streams, self._local_slices()], self.storage)

        return assemble()

    def _slices(self, handles: Handles, device: torch.device) -> Iterator[SliceValues]:
        settings = self._channel
        assert settings is not None, "streams need a channel"
        known = () if isinstance(handles, HandedOver) else handles
        for number, handle in enumerate(handles):
            for early in known[number : number + MAX_BUCKETS]:
                if not isinstance(early, NearHandle):
                    open_channel(settings).expect(early, self._receiver)
            if isinstance(handle, NearHandle):
                bucket = open_channel(settings.nearby).receive(handle.handle, self._receiver)
            else:
                bucket = open_channel(settings).receive(handle, self._receiver)
            self.num_bytes += bucket.num_bytes
            if bucket.version is not None:
                bucket = delta_receiver(settings).decode(bucket)
            bucket = bucket.copied_to(device) if isinstance(handles, HandedOver) else bucket.on(device)
            verify_bucket(bucket)
            self.checksum = (self.checksum + sum(entry.checksum for entry in bucket.entries)) % MODULUS
            yield from unpack_bucket(bucket)

    def _local_slices(self) -> Iterator[SliceValues]:
        for values in () if self._local is None else self._local():
            self.local_checksum = (self.local_checksum + values.checksum) % MODULUS
            self.checksum = (self.checksum + values.checksum) % MODULUS
            yield values


T = TypeVar("T")


def prefetched(items: Iterator[T], size_of: Callable[[T], int], max_size: int) -> Generator[T, None, None]:
    """Yield items that a thread takes from an iterator ahead of their use.

    What the iterator raises is raised here, after the items before it. When the consumer stops early, the
    thread ends after the item that it is taking. The thread waits while the items that are ready have at
    least `max_size`, by `size_of`.
    """
    ready: deque[T] = deque()
    changed = threading.Condition()
    is_closed = is_finished = False
    failure: BaseException | None = None

    def take() -> None:
        nonlocal is_finished, failure
        try:
            for item in items:
                with changed:
                    ready.append(item)
                    changed.notify_all()
                    changed.wait_for(lambda: is_closed or sum(map(size_of, ready)) < max_size)
                    if is_closed:
                        return
        except BaseException as error:  # noqa: BLE001 - raised by the consumer
            failure = error
        finally:
            with changed:
                is_finished = True
                changed.notify_all()

    threading.Thread(target=take, name="hflow-weights", daemon=True).start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: ready or is_finished)
                if not ready:
                    break
                item = ready.popleft()
                changed.notify_all()
            yield item
        if failure is not None:
            raise failure
    finally:
        with changed:
            is_closed = True
            changed.notify_all()
