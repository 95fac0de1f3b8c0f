"""Weights in the memory of a GPU, which another process reads. Tests that need no GPU run without one."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from channel_process import Receivers, buckets
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from hflow.base.errors import RunError
from hflow.weights.buckets import Bucket, unpack_bucket
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.channels.ipc import channel as ipc
from hflow.weights.delta import DeltaSender

SETTINGS = ChannelSettings("ipc", "actor@gen-0", "")


def on_gpu(packed: list[Bucket]) -> list[Bucket]:
    return [bucket.on(torch.device("cuda", 0)) for bucket in packed]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receivers]:
    one = Receivers(1)
    yield one
    one.close()


@pytest.mark.gpu
@pytest.mark.parametrize("delta", [False, True])
def test_a_process_on_the_same_gpu_reads_what_was_packed(delta: bool, receiver: Receivers) -> None:
    """Three versions; the memory of each is used again after it was loaded."""
    settings = replace(SETTINGS, owner=f"actor@gen-{delta}")
    channel, sender = make_channel(settings), DeltaSender(settings.owner)
    packed = on_gpu(buckets(4))
    for version in range(3):
        if version:
            packed = [replace(bucket, payload=bucket.payload.clone()) for bucket in packed]
            packed = [changed(bucket, version) for bucket in packed]
        sender.start(version)
        sent = [sender.encode((1,), bucket) if delta else bucket for bucket in packed]
        assert [bucket.has_changes for bucket in sent] == [delta and version > 0] * len(sent)
        handles = [channel.send((1,), bucket) for bucket in sent]
        receiver.start(settings, [[handles]], "cuda")
        (answer,) = receiver.answers()
        wanted = {x.slice.tensor: x.values.float().cpu() for one in packed for x in unpack_bucket(one)}
        assert answer.keys() == wanted.keys()
        assert all(np.array_equal(values, wanted[name].numpy()) for name, values in answer.items())
        channel.free(handles)
        sender.loaded()
    channel.close()


def changed(bucket: Bucket, version: int) -> Bucket:
    """The bucket of a version that differs in one entry, with the checksum of its new content."""
    (values,) = unpack_bucket(bucket)
    values.values[version] += 1.0
    (entry,) = bucket.entries
    checksum = type(values).of(values.slice, values.values).checksum
    return replace(bucket, entries=(entry._replace(checksum=checksum),))


def test_weights_in_host_memory_are_refused() -> None:
    with pytest.raises(RunError, match=r"ipc needs weights on a GPU; set models.NAME.gen.transport=shared"):
        make_channel(SETTINGS).send((1,), buckets(1)[0])


def test_buckets_are_opened_on_the_receivers_number_of_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may see GPUs under other numbers than the one that packed the bucket."""
    (bucket,) = buckets(1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(ipc, "_device_id", lambda index: f"gpu {index}")

    def rebuild(*arguments: Any) -> torch.Tensor:
        assert arguments == tuple(3 if name == "storage_device" else name for name in names)
        return bucket.payload

    names = tuple(inspect.signature(rebuild_cuda_tensor).parameters)
    handle = ipc.DeviceBucket("gpu 3", rebuild, names, bucket.header)
    assert make_channel(SETTINGS).receive(handle, 1).payload is bucket.payload
    with pytest.raises(RunError, match="ipc needs trainer and engine on one GPU, but weights are on another"):
        make_channel(SETTINGS).receive(handle._replace(device="gpu 0"), 1)


def test_a_freed_bucket_takes_the_reference_of_its_receiver_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a receiver has opened it, or ended before."""
    (packed,), released, numbers = buckets(1), [], iter(range(100))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(ipc, "_device_id", str)
    monkeypatch.setattr(ipc, "reduce_tensor", lambda payload: (rebuild_cuda_tensor, shared(next(numbers))))
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *counter: released.append(counter)
    )
    names = tuple(inspect.signature(rebuild_cuda_tensor).parameters)

    def shared(number: int) -> tuple[Any, ...]:
        counter = {"ref_counter_handle": b"file", "ref_counter_offset": number}
        return tuple(counter.get(name) for name in names)

    def send() -> tuple[Any, weakref.ref[Any]]:
        payload = PretendPayload()
        handle = channel.send((1,), replace(packed, payload=payload))  # type: ignore[arg-type]
        return handle, weakref.ref(payload)

    channel = make_channel(SETTINGS)
    handles, payloads = zip(*(send() for _ in range(3)), strict=True)
    assert all(payload() is not None for payload in payloads)
    channel.free(handles[1:])
    assert sorted(released) == [(b"file", 1), (b"file", 2)]
    assert [payload() is None for payload in payloads] == [False, True, True]
    channel.close()
    assert payloads[0]() is None
    channel.close()
    assert released[2:] == [(b"file", 0)]


class PretendPayload:
    """What the channel asks a payload on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.gpu
def test_memory_that_no_receiver_opens_is_free_again() -> None:
    channel = make_channel(SETTINGS)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        handles = [channel.send((1,), bucket) for bucket in on_gpu(buckets(4))]
        assert torch.cuda.memory_allocated() > before
        channel.free(handles)
        assert torch.cuda.memory_allocated() == before
