"""Weights that a worker hands over to an engine's process, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from channel_process import buckets

from hflow.base.errors import WorkerFailureError
from hflow.types.tensor_slices import MAX_BUCKETS
from hflow.weights.buckets import Bucket, unpack_bucket
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.channels.shared.channel import SharedBucket
from hflow.weights.handover import HandedOver, HandoverSender, handover_address
from hflow.weights.incoming import IncomingWeights


@pytest.fixture
def settings(tmp_path: Path) -> ChannelSettings:
    return ChannelSettings("shared", "actor@gen-0", str(tmp_path))


@pytest.fixture
def address(settings: ChannelSettings) -> str:
    return handover_address(settings.owner, settings.directory)


def never() -> bool:
    return False


def test_tensors_arrive_and_few_buckets_exist_at_a_time(settings: ChannelSettings, address: str) -> None:
    """Tensors keep their values though the memory of their buckets is used again."""
    packed = buckets(8)
    incoming = IncomingWeights(settings, 0, "cpu", [HandedOver(address, 20.0)])
    places: set[int] = set()
    channel = make_channel(settings)

    class Recorded:
        def send(self, receivers: tuple[int, ...], bucket: Bucket) -> SharedBucket:
            handle = channel.send(receivers, bucket)
            places.add(handle.inode)
            return handle

        free = staticmethod(channel.free)

    with closing(HandoverSender(Recorded(), address, 20.0)) as sender, ThreadPoolExecutor(1) as thread:  # type: ignore[arg-type]
        loaded = thread.submit(lambda: {one.name: one.tensor for one in incoming})
        sender.send(0, packed, never)
        arrived = loaded.result()
    wanted = {one.slice.tensor: one.values for bucket in packed for one in unpack_bucket(bucket)}
    assert arrived.keys() == wanted.keys()
    assert all(torch.equal(arrived[name], wanted[name]) for name in wanted)
    assert incoming.checksum == sum(entry.checksum for one in packed for entry in one.entries) % 2**64
    assert 1 <= len(places) <= MAX_BUCKETS < len(packed)
    channel.close()


def test_a_receiver_that_ends_fails_the_sender(settings: ChannelSettings, address: str) -> None:
    channel = make_channel(settings)

    def take_one() -> None:
        taking = iter(HandedOver(address, 20.0))
        next(taking)

    with closing(HandoverSender(channel, address, 20.0)) as sender, ThreadPoolExecutor(1) as thread:
        taken = thread.submit(take_one)
        with pytest.raises(
            WorkerFailureError, match="the engine on this device ended while it was sent weights"
        ):
            sender.send(0, buckets(4), never)
        taken.result()
    channel.close()


def test_a_receiver_that_has_failed_is_not_waited_for(settings: ChannelSettings, address: str) -> None:
    channel = make_channel(settings)
    with (
        closing(HandoverSender(channel, address, 20.0)) as sender,
        pytest.raises(WorkerFailureError, match="the engine on this device does not take weights"),
    ):
        sender.send(0, buckets(1), lambda: True)
    channel.close()


def test_a_sender_that_fails_fails_the_receiver(settings: ChannelSettings, address: str) -> None:
    channel = make_channel(settings)

    def failing() -> Iterator[Bucket]:
        yield from buckets(1)
        raise RuntimeError("no memory")

    with closing(HandoverSender(channel, address, 20.0)) as sender, ThreadPoolExecutor(1) as thread:
        taken = thread.submit(lambda: list(HandedOver(address, 20.0)))
        with pytest.raises(RuntimeError, match="no memory"):
            sender.send(0, failing(), never)
        with pytest.raises(
            WorkerFailureError, match="the trainer on this device ended while it sent weights"
        ):
            taken.result()
    channel.close()


def test_a_sender_that_is_not_there_is_waited_for(address: str) -> None:
    with pytest.raises(WorkerFailureError, match="the trainer on this device sends no weights"):
        list(HandedOver(address, 0.1))
