"""Channels that carry weights between processes: received values equal sent ones, and nothing remains."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hflow.base.errors import RunError
from hflow.models import host_copy
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.weights.buckets import Bucket, pack_buckets, unpack_bucket, verify_bucket
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings, WeightChannel
from hflow.weights.channels.shared import channel as channel_of_shared_memory


def bucket(num_entries: int = 12) -> Bucket:
    piece = WeightSlice("w", (num_entries,), ((0, num_entries),), 0)
    (packed,) = pack_buckets([(piece, torch.arange(num_entries, dtype=torch.uint8))])
    return packed


@pytest.fixture(params=["memory", "disk"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> WeightChannel:
    return make_channel(ChannelSettings(request.param, "a-0", str(tmp_path / "weights")))


def test_received_buckets_equal_sent_ones(channel: WeightChannel):
    sent = [bucket(12), bucket(7)]
    handles = [channel.send((1,), one) for one in sent]
    taken = [channel.receive(pickle.loads(pickle.dumps(handle)), 1) for handle in handles]
    values = [[(x.slice, x.values.tolist(), x.checksum) for x in unpack_bucket(one)] for one in sent]
    assert [[(x.slice, x.values.tolist(), x.checksum) for x in unpack_bucket(one)] for one in taken] == values
    for one in taken:
        verify_bucket(one)


def test_files_appear_complete_and_are_removed(tmp_path: Path):
    directory = tmp_path / "run" / "weights"
    senders = [
        make_channel(ChannelSettings("disk", owner, str(directory)))
        for owner in ("actor@gen-0", "actor@gen-1")
    ]
    handles = [[sender.send((1,), bucket()) for _ in range(2)] for sender in senders]
    assert len(list(directory.iterdir())) == 4
    assert {path.suffix for path in directory.iterdir()} == {".safetensors"}, (
        "nothing has its first name any more"
    )
    for sender, sent in zip(senders, handles, strict=True):
        sender.free(sent)
    assert list(directory.iterdir()) == []


def test_a_missing_or_incomplete_file_is_an_error(tmp_path: Path):
    channel = make_channel(ChannelSettings("disk", "a-0", str(tmp_path)))
    handle = channel.send((1,), bucket())
    Path(handle.path).write_bytes(b"short")
    with pytest.raises(RunError, match=r"a-0-0.safetensors has 5 bytes instead of \d+"):
        channel.receive(handle, 1)
    channel.free([handle])
    with pytest.raises(RunError, match=r"is missing; set out="):
        channel.receive(handle, 1)


class Driver:
    """Answers as CUDA's runtime does: with these codes to `cudaHostRegister`, in turn."""

    def __init__(self, codes: Sequence[int]) -> None:
        self.codes = list(codes)
        self.pinned: set[int] = set()
        self.calls: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append("pin")
        code = self.codes.pop(0)
        self.pinned |= {address} if code == 0 else set()
        return code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unpin")
        self.pinned.remove(address)
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"


def test_shared_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The first segment was mapped before CUDA is initialized, and the next two cannot be pinned."""
    host_copy._warn.cache_clear()
    driver = Driver([2, 2, 0])
    sender = make_channel(ChannelSettings("shared", "a-0", ""))
    receiver = make_channel(ChannelSettings("shared", "a-0", ""))
    sent = [bucket(num) for num in (12, 100, 1000, 10_000)]
    handles = [sender.send((1,), one) for one in sent]
    receiver.receive(handles[0], 1)
    accelerator = SimpleNamespace(cudart=lambda: driver)
    for module in (channel_of_shared_memory, host_copy):
        monkeypatch.setattr(module, "initialized_accelerator", lambda: accelerator)
    monkeypatch.setattr(host_copy, "_forget_cuda_error", lambda: driver.calls.append("forget"))
    for _ in range(2):
        for one, handle in zip(sent[1:], handles[1:], strict=True):
            assert receiver.receive(handle, 1).payload.equal(one.payload)
    assert driver.calls == ["pin", "forget", "pin", "forget", "pin"]
    assert [record.getMessage() for record in caplog.records] == [
        "host memory is not pinned (error 2), so copies between it and the GPU are slower"
    ]
    receiver.close()
    assert driver.calls[-2:] == ["pin", "unpin"]
    assert not driver.pinned
    sender.close()
    assert driver.calls[-2:] == ["pin", "unpin"]
