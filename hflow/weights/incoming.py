"""Weights on their way into an engine: `IncomingWeights` of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hflow.planner.weights.weight_slices import WeightSlice
from hflow.types.tensor_slices import whole_box
from hflow.weights.buckets import IncomingTensor, SliceValues, assemble_tensors, unpack_bucket
from hflow.weights.channels import open_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.checksum import MODULUS
from hflow.weights.outgoing import ChecksummedSlices

Handles = Sequence[Any]
"""What a channel's `send` returned for the buckets of one stream, in order."""


class IncomingWeights:
    """The weights of one version that one rank of an engine receives, tensor by tensor.

    It can be pickled and iterated in another process, such as the rank's own, unless this process holds some
    of the weights (`local`). The receiving end of the channel opens when the iteration starts, and remains
    open for later versions. Iterate only once.

    Args:
        channel: carries the buckets; None: all weights are local.
        streams: the handles of each stream that has this rank among its receivers, in the plan's order.
        local: called for the slices that this process holds itself, in the order of the tensors.
    """

    def __init__(
        self,
        channel: ChannelSettings | None,
        streams: Sequence[Handles] = (),
        local: Callable[[], Iterable[SliceValues]] | None = None,
    ) -> None:
        self._channel = channel
        self._streams = streams
        self._local = local
        self._local_slices = ChecksummedSlices(())
        self._received_checksum = 0
        self.num_bytes = 0
        """Bytes that were received so far."""

    @classmethod
    def of_tensors(cls, tensors: Callable[[], Iterable[tuple[str, Tensor]]]) -> IncomingWeights:
        """Return whole tensors of this process as incoming weights.

        Args:
            tensors: called for `(HF name, full tensor)` when the iteration starts.
        """
        return cls(
            None,
            local=lambda: (
                SliceValues.of(
                    WeightSlice(place, name, tuple(tensor.shape), whole_box(tuple(tensor.shape))), tensor
                )
                for place, (name, tensor) in enumerate(tensors())
            ),
        )

    @property
    def local_checksum(self) -> int:
        """Checksum of the weights that this process holds itself; complete when the iteration has ended."""
        return self._local_slices.checksum

    @property
    def checksum(self) -> int:
        """Checksum of all slices as they arrived; complete when the iteration has ended."""
        return (self._received_checksum + self._local_slices.checksum) % MODULUS

    def __iter__(self) -> Iterator[IncomingTensor]:
        """Yield each tensor with the boxes of it that arrived; the rest of the tensor is uninitialised."""
        self._local_slices = ChecksummedSlices(() if self._local is None else self._local())
        return assemble_tensors([*map(self._received_slices, self._streams), self._local_slices])

    def _received_slices(self, handles: Handles) -> Iterator[SliceValues]:
        assert self._channel is not None, "streams need a channel"
        channel = open_channel(self._channel)
        for handle in handles:
            bucket = channel.receive(handle)
            self.num_bytes += bucket.num_bytes
            slices = ChecksummedSlices(unpack_bucket(bucket))
            yield from slices
            self._received_checksum = (self._received_checksum + slices.checksum) % MODULUS
