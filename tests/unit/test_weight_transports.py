"""Transports of weights between processes: received values equal sent ones, and nothing is left over."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from hflow.errors import RunError
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.workers.weights.buckets import Bucket, BucketEntry
from hflow.workers.weights.transports.disk import DiskTransport
from hflow.workers.weights.transports.interface import Transport
from hflow.workers.weights.transports.memory import MemoryTransport


def bucket(num_bytes: int = 12) -> Bucket:
    rows = (BucketEntry(WeightSlice(0, "w", (num_bytes,), ((0, num_bytes),)), "uint8", 0, num_bytes),)
    return Bucket(rows, np.arange(num_bytes, dtype=np.uint8))


@pytest.fixture(params=["memory", "disk"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    return MemoryTransport() if request.param == "memory" else DiskTransport(tmp_path / "weights", "a-0")


def test_received_buckets_equal_sent_ones(transport: Transport):
    sent = [bucket(12), bucket(7)]
    handles = [transport.put(one) for one in sent]
    taken = [transport.take(pickle.loads(pickle.dumps(handle))) for handle in handles]
    assert [one.entries for one in taken] == [one.entries for one in sent]
    assert all(np.array_equal(a.payload, b.payload) for a, b in zip(taken, sent, strict=True))
    transport.free(handles)
    assert np.array_equal(taken[0].payload, sent[0].payload), "what was taken before stays readable"


def test_files_appear_complete_and_are_removed(tmp_path: Path):
    directory = tmp_path / "run" / "weights"
    senders = [DiskTransport(directory, owner) for owner in ("actor@gen-0", "actor@gen-1")]
    handles = [[sender.put(bucket()) for _ in range(2)] for sender in senders]
    assert len(list(directory.iterdir())) == 4
    assert {path.suffix for path in directory.iterdir()} == {".bin"}, "nothing has its first name any more"
    for sender, sent in zip(senders, handles, strict=True):
        sender.free(sent)
    assert list(directory.iterdir()) == []


def test_a_missing_or_incomplete_file_is_an_error(tmp_path: Path):
    transport = DiskTransport(tmp_path, "a-0")
    handle = transport.put(bucket())
    Path(handle.path).write_bytes(b"short")
    with pytest.raises(RunError, match=r"a-0-0.bin has 5 bytes instead of 12"):
        transport.take(handle)
    transport.free([handle])
    with pytest.raises(RunError, match=r"is missing; set out="):
        transport.take(handle)
