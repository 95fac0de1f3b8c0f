"""Channels that carry weights between processes: received values equal sent ones, and nothing remains."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from hflow.errors import RunError
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.weights.buckets import Bucket, BucketEntry
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings, WeightChannel


def bucket(num_bytes: int = 12) -> Bucket:
    rows = (BucketEntry(WeightSlice(0, "w", (num_bytes,), ((0, num_bytes),)), "uint8", 0, num_bytes),)
    return Bucket(rows, np.arange(num_bytes, dtype=np.uint8))


@pytest.fixture(params=["memory", "disk"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> WeightChannel:
    return make_channel(ChannelSettings(request.param, "a-0", str(tmp_path / "weights")))


def test_received_buckets_equal_sent_ones(channel: WeightChannel):
    sent = [bucket(12), bucket(7)]
    handles = [channel.send(one) for one in sent]
    taken = [channel.receive(pickle.loads(pickle.dumps(handle))) for handle in handles]
    assert [one.entries for one in taken] == [one.entries for one in sent]
    assert all(np.array_equal(a.payload, b.payload) for a, b in zip(taken, sent, strict=True))
    channel.free(handles)
    assert np.array_equal(taken[0].payload, sent[0].payload), "what was taken before stays readable"


def test_files_appear_complete_and_are_removed(tmp_path: Path):
    directory = tmp_path / "run" / "weights"
    senders = [
        make_channel(ChannelSettings("disk", owner, str(directory)))
        for owner in ("actor@gen-0", "actor@gen-1")
    ]
    handles = [[sender.send(bucket()) for _ in range(2)] for sender in senders]
    assert len(list(directory.iterdir())) == 4
    assert {path.suffix for path in directory.iterdir()} == {".bin"}, "nothing has its first name any more"
    for sender, sent in zip(senders, handles, strict=True):
        sender.free(sent)
    assert list(directory.iterdir()) == []


def test_a_missing_or_incomplete_file_is_an_error(tmp_path: Path):
    channel = make_channel(ChannelSettings("disk", "a-0", str(tmp_path)))
    handle = channel.send(bucket())
    Path(handle.path).write_bytes(b"short")
    with pytest.raises(RunError, match=r"a-0-0.bin has 5 bytes instead of 12"):
        channel.receive(handle)
    channel.free([handle])
    with pytest.raises(RunError, match=r"is missing; set out="):
        channel.receive(handle)
