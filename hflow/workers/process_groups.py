"""The torch.distributed world of a run's workers, and a group for each set that works together."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup

from hflow.planner.ir import Replica


@dataclass(frozen=True)
class Membership:
    """One worker process's place in the world."""

    rank: int
    num_workers: int
    address: str
    """`host:port` of the meeting place that rank 0 has opened."""


_opened: dict[str, TCPStore] = {}
"""Address -> a meeting place that this process has opened, until it joins the world that meets there."""


def open_meeting(host: str) -> str:
    """Open a place where the workers of a world find each other; returns its `host:port`.

    The port is taken from here on: one that is merely looked up may be somebody else's when it is needed.

    Args:
        host: this machine's address, as the other workers know it.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    address = f"{host}:{store.port}"
    _opened[address] = store
    return address


def _meeting(address: str, timeout: datetime.timedelta) -> TCPStore:
    """The meeting place at an address, which another process may have opened."""
    host, _, port = address.rpartition(":")
    return _opened.pop(address, None) or TCPStore(host, int(port), is_master=False, timeout=timeout)


_COUNTING = ("gloo", "nccl")
"""Backends that count collectives; a group of several (`cpu:gloo,cuda:nccl`) does not."""


def collective_counts() -> dict[str, int]:
    """Process group -> collectives that this process has issued in it."""
    if not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    groups = [group for group, (backend, _) in world.pg_map.copy().items() if backend in _COUNTING]
    return {world.pg_names[group]: _count(group) for group in groups}


def _count(group: Any) -> int:
    number: int = group._get_sequence_number_for_group()  # torch's type stubs lack it
    return number


class World:
    """Joined once per run. A process that serves another run leaves it then, else when it ends.

    Every process creates the same groups in the same order, which torch.distributed needs.
    Replicas on the same workers share a group: the plan lets them take turns.
    """

    def __init__(self, member: Membership, replicas: Sequence[Replica], device: str, timeout: float) -> None:
        """Join; returns when all workers have joined.

        Args:
            member: this process's place.
            replicas: the plan's; those with several workers get a group.
            device: `cpu` (gloo) or `cuda` (NCCL).
            timeout: seconds after which a collective with a missing rank fails.
        """
        patience = datetime.timedelta(seconds=timeout)
        if device == "cuda":
            torch.cuda.set_device(0)
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=_meeting(member.address, patience),
            rank=member.rank,
            world_size=member.num_workers,
            timeout=patience,
        )
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        for replica in replicas:
            ranks = replica.workers
            assert list(ranks) == sorted(set(ranks)), f"ranks of {replica.name} are not in device order"
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks), timeout=patience)

    def group(self, replica: Replica) -> ProcessGroup | None:
        """The group over a replica's workers; None where it has only one."""
        return self._groups.get(replica.workers)
