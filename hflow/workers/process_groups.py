"""The torch.distributed process groups of a run.

There is one over all workers that train or infer, and one per set of them that works together.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup

from hflow.base.devices import collective_backend, is_gpu
from hflow.planner.plan.rows import Replica
from hflow.weights.rendezvous import connect_store, listen_where, open_store

START_TIMEOUT = datetime.timedelta(hours=6)
"""Time in which all workers load their models. Those of hundreds of GB take an hour from a slow disk."""


@dataclass(frozen=True)
class ProcessRank:
    """The rank of a worker process among those that train or infer."""

    worker: int
    members: tuple[int, ...]
    """rank -> worker. A worker that only generates takes part in no collective, so it may be replaced."""
    address: str
    """`host:port` of the rendezvous that rank 0 has opened."""


class ProcessGroups:
    """Joined once per run. A process that serves another run leaves the groups then, else when it ends.

    Every process creates the same groups in the same order, as torch.distributed requires. Replicas on the
    same workers share a group, because the plan lets them take turns. Engines need none: the ranks of one are
    in processes of its own, where they are several.
    """

    def __init__(self, rank: ProcessRank, replicas: Sequence[Replica], device: str, timeout: float) -> None:
        """Join the groups; returns when all members have joined.

        Each replica that trains or infers on several workers gets a group. A collective with a missing rank
        fails after `timeout` seconds.
        """
        limit = datetime.timedelta(seconds=timeout)
        listen_where(rank.address.rpartition(":")[0])
        if is_gpu(device):
            torch.get_device_module(device).set_device(0)
        leave_process_groups()
        self._num_members = len(rank.members)
        self._store = _rendezvous_store(rank.address, limit)
        dist.init_process_group(
            collective_backend(device),
            store=self._store,
            rank=rank.members.index(rank.worker),
            world_size=len(rank.members),
            timeout=limit,
        )
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}
        created: set[tuple[int, ...]] = set()
        for replica in replicas:
            if replica.role == "gen":
                continue
            ranks = replica.workers
            assert list(ranks) == sorted(set(ranks)), f"ranks of {replica.name} are not in device order"
            if len(ranks) > 1 and ranks not in created:
                created.add(ranks)
                members = [rank.members.index(worker) for worker in ranks]
                group = dist.new_group(members, timeout=limit)
                if isinstance(group, ProcessGroup):  # not on a rank outside the group
                    self._groups[ranks] = group

    def wait_for_all(self) -> None:
        """Wait until every member has called this. It needs no communicator, and so no device memory.

        Members come when they have loaded their models, which may take longer than any collective. One that
        fails ends the run.
        """
        if self._store.add("hflow/num-waiting", 1) == self._num_members:
            self._store.set("hflow/all-wait", "")
        self._store.wait(["hflow/all-wait"], START_TIMEOUT)

    def group(self, replica: Replica) -> ProcessGroup | None:
        """Return the group over the workers of a replica that trains or infers; None for a single worker."""
        return self._groups.get(replica.workers)


_open_stores: dict[str, TCPStore] = {}
"""Address -> a rendezvous that this process has opened and not yet joined."""


def leave_process_groups() -> None:
    """Leave the groups of the run that this process served before, if any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def collective_workers(replicas: Sequence[Replica]) -> tuple[int, ...]:
    """Return the workers that take part in collectives: those that train or infer, in ascending order."""
    return tuple(sorted({w for replica in replicas if replica.role != "gen" for w in replica.workers}))


def open_rendezvous(host: str) -> str:
    """Open a rendezvous for the workers of a run at this machine's address; returns its `host:port`."""
    store = open_store(host)
    address = f"{host}:{store.port}"
    _open_stores[address] = store
    return address


def _rendezvous_store(address: str, timeout: datetime.timedelta) -> TCPStore:
    """Return the store of a rendezvous, which this or another process has opened."""
    return _open_stores.pop(address, None) or connect_store(address, timeout)


_COUNTING_BACKENDS = ("gloo", "nccl")
"""Backends that count collectives; a combination (`cpu:gloo,cuda:nccl`) does not."""


def collective_counts() -> dict[str, int]:
    """Return process group -> number of collectives that this process has issued in it."""
    if not dist.is_initialized():
        return {}
    world = dist.distributed_c10d._world
    groups = [group for group, (backend, _) in world.pg_map.copy().items() if backend in _COUNTING_BACKENDS]
    return {world.pg_names[group]: _collective_count(group) for group in groups}


def _collective_count(group: Any) -> int:
    count: int = group._get_sequence_number_for_group()  # torch's type stubs lack it
    return count
