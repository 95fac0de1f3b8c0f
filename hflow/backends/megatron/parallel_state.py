"""A replica's data, tensor and pipeline axes, with a process group for each.

Megatron's global `parallel_state` stays uninitialised. Groups are passed to what needs them, so replicas of
different layouts can exist in one process.

torch names a new group in one of two ways: by a counter that all processes of the world must advance
together, which processes outside the replica do not; or (`use_local_synchronization`) by its ranks and the
number of groups that the process has. The second way needs only the group's members if they all have the same
number of groups. So the ranks of a replica first bring that number to the same value, and then make equally
many groups each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from hflow.backends.interface import RankPosition
from hflow.backends.megatron.hf_mapping import ShardPosition


@dataclass(frozen=True)
class ParallelState:
    """Sizes of the axes, this rank's coordinates, and its groups."""

    data: int
    tensor: int
    pipe: int
    d: int
    t: int
    p: int
    group: ProcessGroup
    """All ranks of the replica. A rank is `p * (data * tensor) + d * tensor + t`."""
    groups: ProcessGroupCollection
    """The groups for megatron's model, optimizer and schedule."""
    _made: _Groups = field(repr=False)

    @classmethod
    def of(cls, position: RankPosition) -> ParallelState:
        """Make the groups; a collective over the position's group.

        A process that hosts all ranks of a replica is a single rank, as no result depends on the layout.
        """
        group, sizes = position.group, (position.data, position.tensor, position.pipe)
        if group is None:
            group, sizes = _single_rank_group(), (1, 1, 1)
        data, tensor, pipe = sizes
        assert data * tensor * pipe == group.size(), f"{position} has {group.size()} ranks"
        rest, t = divmod(group.rank(), tensor)
        p, d = divmod(rest, data)
        made = _Groups(group)
        groups = _collection(made, sizes, (d, t, p))
        return cls(data, tensor, pipe, d, t, p, group, groups, made)

    @property
    def shard_position(self) -> ShardPosition:
        """The coordinates that determine which weights this rank holds."""
        return ShardPosition(self.t, self.tensor, self.p, self.pipe)

    @property
    def rank(self) -> int:
        """The number of this rank in the replica."""
        return self.group.rank()

    @property
    def ranks_of_data_index(self) -> list[int]:
        """The ranks with the same data index as this one."""
        stages = range(self.pipe)
        return [(p * self.data + self.d) * self.tensor + t for p in stages for t in range(self.tensor)]

    @property
    def is_first_stage(self) -> bool:
        """Whether this stage receives token ids."""
        return self.p == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage has the head."""
        return self.p == self.pipe - 1

    @property
    def is_head(self) -> bool:
        """Whether this rank receives its data index's inputs and returns its outputs."""
        return self.t == 0 and self.is_last_stage

    def tensor_block(self, size: int) -> ProcessGroup:
        """Return the group of the `size` neighbouring tensor ranks that include this one; a collective."""
        first = self.group.rank() - self.t % size
        return self._made.of(range(first, first + size))


class _Groups:
    """Process groups of a replica's ranks, each made once."""

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


def _collection(
    made: _Groups, sizes: tuple[int, int, int], coords: tuple[int, int, int]
) -> ProcessGroupCollection:
    """Return the groups under megatron's names. There is no context or expert parallelism."""
    (data, tensor, pipe), (d, t, p) = sizes, coords

    def group(ds: Sequence[int], ts: Sequence[int], ps: Sequence[int]) -> ProcessGroup:
        return made.of([stage * data * tensor + i * tensor + j for stage in ps for i in ds for j in ts])

    alone = group([d], [t], [p])
    tp, dp = group([d], range(tensor), [p]), group(range(data), [t], [p])
    pp = group([d], [t], range(pipe))
    ends = None
    if p in (0, pipe - 1):
        ends = group([d], [t], sorted({0, pipe - 1}))
    else:
        made.make_unused()
    return ProcessGroupCollection(
        tp=tp,
        dp=dp,
        pp=pp,
        mp=group([d], range(tensor), range(pipe)),
        embd=ends,
        pos_embd=None,
        dp_cp=dp,
        intra_dp_cp=dp,
        intra_dist_opt=group(range(data), range(tensor), range(pipe)),
        tp_cp=tp,
        tp_dp_cp=group(range(data), range(tensor), [p]),
        cp=alone,
        ep=alone,
        expt_tp=alone,
        expt_dp=alone,
        intra_expt_dp=alone,
        tp_ep=alone,
        tp_ep_pp=alone,
    )


def _single_rank_group() -> ProcessGroup:
    """Return a group of this process alone; makes a world of one process if there is none."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    made = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made


def _timeout_of(group: ProcessGroup) -> timedelta:
    """Return the group's timeout."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
