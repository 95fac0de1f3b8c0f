"""Weight channels between processes: what arrives, and what remains when a process is killed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from channel_process import Receivers, buckets, sender
from torch._C._distributed_c10d import TCPStore

from hflow.base.errors import RunError, WorkerFailureError
from hflow.weights.buckets import unpack_bucket
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def receivers() -> Iterator[Receivers]:
    two = Receivers(2)
    yield two
    two.close()


@pytest.mark.parametrize("name", ["shared", "disk", "collective"])
def test_two_processes_receive_what_two_senders_send(name: str, receivers: Receivers, tmp_path: Path) -> None:
    """Both receive a stream from each sender, and one of their own; versions reuse what is open."""
    settings = [ChannelSettings(name, f"actor@gen-{i}", str(tmp_path), timeout=60) for i in range(2)]
    senders = [make_channel(one) for one in settings]
    packed = buckets(12)
    wanted = {f"w{i}": next(unpack_bucket(one)).values.float().numpy() for i, one in enumerate(packed)}
    for _ in range(2):
        common = [
            [senders[0].send((1, 2), one) for one in packed[0:8:2]],
            [senders[1].send((1, 2), one) for one in packed[1:8:2]],
        ]
        own = [senders[i].send((1 + i,), packed[8 + i]) for i in range(2)]
        late = [senders[i].send((2 - i,), packed[10 + i]) for i in range(2)]
        receivers.start(
            settings[0],
            [
                [common[0], [own[0]], common[1], [late[1]]],
                [common[0], [late[0]], common[1], [own[1]]],
            ],
        )
        first, second = receivers.answers()
        assert first.keys() == {*(f"w{i}" for i in range(8)), "w8", "w11"}
        assert second.keys() == {*(f"w{i}" for i in range(8)), "w9", "w10"}
        for answer in (first, second):
            assert all(np.array_equal(values, wanted[key]) for key, values in answer.items())
        for channel, handles in zip(senders, (common[0], common[1]), strict=True):
            channel.free(handles)
    for channel in senders:
        channel.close()


def test_a_sender_without_receivers_can_close() -> None:
    channel = make_channel(ChannelSettings("collective", "a", "", timeout=60))
    channel.send((1,), buckets(1)[0])
    channel.close()


def test_a_receiver_that_dies_does_not_hold_up_its_sender() -> None:
    """It said that it waits for a bucket, and never came. The sender learns it after the timeout."""
    channel = make_channel(ChannelSettings("collective", "a", "", timeout=2))
    handle = channel.send((1,), buckets(1)[0])
    host, _, port = handle.address.rpartition(":")
    TCPStore(host, int(port), is_master=False).set(f"{handle.key}/all", "")

    def wait_for_failure() -> None:
        for _ in range(600):
            channel.free([])
            time.sleep(0.1)

    with pytest.raises(RunError, match=r"weights could not be broadcast to worker 1: .*collective_timeout"):
        wait_for_failure()
    channel.close()


def test_shared_memory_ends_with_its_sender() -> None:
    with sender(ChannelSettings("shared", "actor@gen-0", "")) as (process, handles):
        receiver = make_channel(ChannelSettings("shared", "actor@gen-0", ""))
        bucket = receiver.receive(handles[0], 1)
        process.kill()
        process.join(60)
        assert torch.equal(bucket.payload, buckets(1)[0].payload), "what is mapped stays readable"
        with pytest.raises(WorkerFailureError, match=r"shared memory of process \d+ cannot be opened"):
            make_channel(ChannelSettings("shared", "another", "")).receive(handles[0], 1)
    others = ("sem.", "hflow-")  # semaphores and sockets, which name the process that has them
    names = [name for name in os.listdir("/dev/shm") if "hflow" in name]
    left = [name for name in names if not name.startswith(others) or f"-{process.pid}-" in name]
    assert left == []
