"""Process groups of some of a replica's ranks.

torch names a new group in one of two ways: by a counter that all processes of the world must advance
together, which processes outside the replica do not; or (`use_local_synchronization`) by its ranks and the
number of groups that the process has. The second way needs only the group's members if they all have the same
number of groups. So the ranks of a replica first bring that number to the same value, and then make equally
many groups each.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class RankGroups:
    """Process groups of a replica's ranks, each made once.

    All ranks of the replica make their groups at the same points of the program.
    """

    def __init__(self, replica: ProcessGroup) -> None:
        self._replica = replica
        self._known = {tuple(range(replica.size())): replica}
        if replica.size() > 1:
            self._equalize_counts()

    def of(self, ranks: Sequence[int]) -> ProcessGroup:
        """Return the group of these ranks of the replica, which include this one."""
        key = tuple(ranks)
        if key not in self._known:
            self._known[key] = self._new(key)
        return self._known[key]

    def make_unused(self) -> None:
        """Make an unused group, at the point where other ranks make a group without this rank."""
        self._new((self._replica.rank(),))

    def _new(self, ranks: tuple[int, ...]) -> ProcessGroup:
        members = [dist.get_global_rank(self._replica, rank) for rank in ranks]
        made = dist.new_group(members, timeout=_timeout_of(self._replica), use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        return made

    def _equalize_counts(self) -> None:
        """Bring all ranks of the replica to the same number of groups."""
        counts = [0] * self._replica.size()
        dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=self._replica)
        for _ in range(max(counts) - counts[self._replica.rank()]):
            self.make_unused()


def existing_groups() -> frozenset[ProcessGroup]:
    """Return the process groups that were not destroyed."""
    return frozenset(dist.distributed_c10d._world.pg_map)


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return the group's timeout."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
