"""Ranks of which one ends: how each wait of the other fails."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch_kit as kit

from hflow.training.fsdp import shard_collectives
from hflow.training.fsdp import sharding as fsdp
from hflow.workers.hangs.stack_probe import StackProbe

ACTIVITY = "running node 'learn', step 2"


def run(rank: int, directory: str) -> None:
    """Run a spawned rank. Rank 1 ends after every wait was done once; rank 0 writes how each fails then."""
    fsdp.MIN_UNIT_BYTES = 0
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    waits = {name: make(rank, dist.new_group([0, 1])) for name, make in WAITS.items()}
    for wait in waits.values():
        wait()
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # so that the other waits for its first message
        os._exit(0)
    Path(f"{directory}/errors").write_bytes(pickle.dumps({name: error(waits[name]) for name in waits}))
    os._exit(0)


def error(wait: Callable[[], object]) -> RuntimeError:
    """Return the error with which a device's thread leaves a wait."""
    try:
        with StackProbe(dict).running(ACTIVITY):
            wait()
    except RuntimeError as found:
        return found
    raise AssertionError("the other rank has ended")


def trains(rank: int, group: Any) -> Callable[[], object]:
    backend, shard = kit.model(2, group), [kit.halves(kit.make_batch(kit.LENGTHS))[rank]]
    return lambda: backend.train(kit.CALLS["token-mean"], shard, 5)


def saves(rank: int, group: Any) -> Callable[[], object]:
    backend, directory = kit.model(2, group), tempfile.mkdtemp()
    return lambda: backend.save(directory)


def own_handle(rank: int, group: Any) -> Callable[[], object]:
    """A body that waits for its own message."""
    received = torch.ones(3)

    def body() -> None:
        sent = dist.isend(torch.ones(3), group=group, group_dst=1 - rank)
        work = dist.irecv(received, group=group, group_src=1 - rank)
        assert sent is not None
        assert work is not None
        work.wait()
        sent.wait()

    return body


WAITS: dict[str, Callable[[int, Any], Callable[[], object]]] = {
    "gather_in_place": lambda rank, group: lambda: shard_collectives.gather_in_place(torch.ones(8), group),
    "sum_parts": lambda rank, group: lambda: shard_collectives.sum_parts(torch.ones(4), torch.ones(8), group),
    "all_reduce": lambda rank, group: lambda: dist.all_reduce(torch.ones(4), group=group),
    "all_gather_object": lambda rank, group: lambda: dist.all_gather_object([None, None], rank, group=group),
    "gather_object": lambda rank, group: (
        lambda: dist.gather_object(rank, [None, None] if rank == 0 else None, group=group, group_dst=0)
    ),
    "functional": lambda rank, group: lambda: functional.all_reduce(torch.ones(4), "sum", group).sum(),
    "own_handle": own_handle,
    "train": trains,
    "save": saves,
}
"""Name -> makes a wait from the rank and a group of two."""
