"""A process at the other end of weight channels."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from hflow.base.errors import RunError
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.weights.buckets import Bucket, pack_buckets
from hflow.weights.channels import make_channel
from hflow.weights.channels.interface import ChannelSettings
from hflow.weights.incoming import IncomingWeights


def buckets(num_tensors: int, size: int = 1000) -> list[Bucket]:
    """A bucket for each of some tensors, `w0`, `w1` and so on."""
    slices = []
    for place in range(num_tensors):
        dtype = torch.bfloat16 if place % 2 else torch.float32
        values = torch.randn(size, generator=torch.Generator().manual_seed(place)).to(dtype)
        slices.append((WeightSlice(f"w{place}", (size,), ((0, size),), place), values))
    return list(pack_buckets(slices, bucket_bytes=1))


def _receive(connection: Connection) -> None:
    """Answer each `IncomingWeights` with its tensors, or with the text of an error."""
    while (incoming := connection.recv()) is not None:
        try:
            connection.send(
                {arrived.name: arrived.tensor.float().cpu().numpy().copy() for arrived in incoming}
            )
        except RunError as error:
            connection.send(str(error))


def _send_and_wait(settings: ChannelSettings, connection: Connection) -> None:
    """Send one bucket, then wait to be killed."""
    channel = make_channel(settings)
    connection.send([channel.send((1,), one) for one in buckets(1)])
    time.sleep(600)


class Receivers:
    """Processes that receive, one for each worker.

    Attributes:
        processes: the processes.
    """

    def __init__(self, num: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(num)]
        self._ends = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_receive, args=(theirs,), daemon=True) for _, theirs in pipes
        ]
        for process in self.processes:
            process.start()

    def start(
        self, settings: ChannelSettings, streams: Sequence[Sequence[Sequence[Any]]], device: str = "cpu"
    ) -> None:
        """Let each process receive its streams, as workers 1, 2 and so on."""
        for worker, (end, handles) in enumerate(zip(self._ends, streams, strict=True), start=1):
            end.send(IncomingWeights(settings, worker, device, handles))

    def answers(self) -> list[Any]:
        """What each process received."""
        for end in self._ends:
            assert end.poll(120)
        return [end.recv() for end in self._ends]

    def close(self) -> None:
        for process, end in zip(self.processes, self._ends, strict=True):
            if process.is_alive():
                end.send(None)
            process.join(60)


@contextmanager
def sender(settings: ChannelSettings) -> Iterator[tuple[Any, list[Any]]]:
    """A process that sends a bucket, with its handles."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_and_wait, args=(settings, theirs), daemon=True)
    process.start()
    try:
        assert ours.poll(120)
        yield process, ours.recv()
    finally:
        process.kill()
        process.join(60)
