"""A replica's ranks on data, tensor and pipeline axes, with a process group for each axis.

Megatron's global `parallel_state` stays uninitialised: groups are handed to what needs them, so replicas of
different layouts live side by side in one process.

torch names a new group either by a counter that all processes of the world must advance together, which
processes outside the replica do not, or (`use_local_synchronization`) by its ranks and the number of groups
that the process has. The latter needs only the members, if that number is the same for all of them: so the
ranks of a replica first bring it to the same value, and then make equally many groups each.
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
    """All ranks of the replica; a rank is `p * (data * tensor) + d * tensor + t`."""
    groups: ProcessGroupCollection
    """What megatron's model, optimizer and schedule are handed."""
    _made: _Groups = field(repr=False)

    @classmethod
    def of(cls, position: RankPosition) -> ParallelState:
        """Make the groups; a collective over the position's group.

        A process that hosts all ranks of a replica is a parallel of one, as no result depends on the layout.
        """
        group, sizes = position.group, (position.data, position.tensor, position.pipe)
        if group is None:
            group, sizes = _alone(), (1, 1, 1)
        data, tensor, pipe = sizes
        assert data * tensor * pipe == group.size(), f"{position} has {group.size()} ranks"
        rest, t = divmod(group.rank(), tensor)
        p, d = divmod(rest, data)
        made = _Groups(group)
        groups = _collection(made, sizes, (d, t, p))
        return cls(data, tensor, pipe, d, t, p, group, groups, made)

    @property
    def place(self) -> ShardPosition:
        """Coordinates that decide which weights this rank holds."""
        return ShardPosition(self.t, self.tensor, self.p, self.pipe)

    @property
    def is_first_stage(self) -> bool:
        """Whether token ids go in here."""
        return self.p == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the head is here."""
        return self.p == self.pipe - 1

    @property
    def is_head(self) -> bool:
        """Whether this rank receives its data index's inputs and returns its outputs."""
        return self.t == 0 and self.is_last_stage

    def tensor_block(self, size: int) -> ProcessGroup:
        """The group of the `size` neighbouring tensor ranks that include this one; a collective."""
        first = self.group.rank() - self.t % size
        return self._made.of(range(first, first + size))


class _Groups:
    """Groups of a replica's ranks, each made once."""

    def __init__(self, replica: ProcessGroup) -> None:
        self._replica = replica
        self._known = {tuple(range(replica.size())): replica}
        if replica.size() > 1:
            self._count_alike()

    def of(self, ranks: Sequence[int]) -> ProcessGroup:
        """The group of these ranks of the replica, this one among them."""
        key = tuple(ranks)
        if key not in self._known:
            self._known[key] = self._new(key)
        return self._known[key]

    def make_spare(self) -> None:
        """Make a group that nobody uses, where other ranks make one that this rank is not in."""
        self._new((self._replica.rank(),))

    def _new(self, ranks: tuple[int, ...]) -> ProcessGroup:
        members = [dist.get_global_rank(self._replica, rank) for rank in ranks]
        made = dist.new_group(members, timeout=_patience(self._replica), use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        return made

    def _count_alike(self) -> None:
        """Give all ranks of the replica the same number of groups."""
        counts = [0] * self._replica.size()
        dist.all_gather_object(counts, len(dist.distributed_c10d._world.pg_names), group=self._replica)
        for _ in range(max(counts) - counts[self._replica.rank()]):
            self.make_spare()


def _collection(
    made: _Groups, sizes: tuple[int, int, int], coords: tuple[int, int, int]
) -> ProcessGroupCollection:
    """Megatron's names for the groups; there is neither context nor expert parallelism."""
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
        made.make_spare()
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


def _alone() -> ProcessGroup:
    """A group of this process; where there is no world yet, a world of its own."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    made = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made


def _patience(group: ProcessGroup) -> timedelta:
    """How long a collective of the group waits for a missing rank."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    patience: timedelta = group._get_backend(device).options._timeout
    return patience
