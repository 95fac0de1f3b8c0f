"""A replica's data, tensor, pipeline, context and expert axes, with a process group for each.

Megatron's global `parallel_state` stays uninitialised. Groups are passed to what needs them, so replicas of
different layouts can exist in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup

from hflow.models.settings import RankPosition
from hflow.shapes.layout import Coords, Layout, RankOrder
from hflow.training.megatron.hf_mapping import ShardPosition
from hflow.training.rank_groups import RankGroups, existing_groups


@dataclass(frozen=True)
class ParallelState:
    """A replica's layout, this rank's coordinates, and its groups."""

    layout: Layout
    coords: Coords
    group: ProcessGroup
    """All ranks of the replica, in `RankOrder.TRAIN`."""
    groups: ProcessGroupCollection
    """The groups for megatron's model, optimizer and schedule."""
    same_data: ProcessGroup
    """The ranks with the same data index as this one. They compute with the same samples."""
    _made: RankGroups = field(repr=False)

    @classmethod
    def of(cls, position: RankPosition) -> ParallelState:
        """Make the groups; a collective over the position's group.

        Models with the same ranks and layout share their groups, as each one has buffers on the device. They
        take turns there. A process that hosts all ranks of a replica is a single rank, as no result depends
        on the layout.
        """
        group, layout = position.group, position.layout
        if group is None:
            group, layout = _single_rank_group(), Layout()
        assert layout.world == group.size(), f"{layout} has {group.size()} ranks"
        _known_states[:] = [state for state in _known_states if state.group in existing_groups()]
        for state in _known_states:
            if state.group is group and state.layout == layout:
                return state
        made, coords = RankGroups(group), layout.coords(RankOrder.TRAIN, group.rank())
        state = cls(layout, coords, group, *_collection(made, layout, coords), made)
        _known_states.append(state)
        return state

    @property
    def shard_position(self) -> ShardPosition:
        """The coordinates that determine which weights this rank holds."""
        return self.shard_position_of(self.p, self.e, self.t)

    def shard_position_of(self, stage: int, expert: int, tensor: int) -> ShardPosition:
        """Return the position of the ranks of a pipeline stage with an expert and a tensor index."""
        return ShardPosition(tensor, self.tensor, stage, self.pipe, expert, self.expert)

    @property
    def rank(self) -> int:
        """The number of this rank in the replica."""
        return self.group.rank()

    @property
    def data(self) -> int:
        """Number of data ranks."""
        return self.layout.data

    @property
    def tensor(self) -> int:
        """Number of tensor ranks."""
        return self.layout.tensor

    @property
    def pipe(self) -> int:
        """Number of pipeline stages."""
        return self.layout.pipe

    @property
    def context(self) -> int:
        """Number of context ranks."""
        return self.layout.context

    @property
    def expert(self) -> int:
        """Number of neighbouring data and context ranks that divide the experts of a layer."""
        return self.layout.expert

    @property
    def t(self) -> int:
        """Tensor index of this rank."""
        return self.coords[1]

    @property
    def p(self) -> int:
        """Pipeline stage of this rank."""
        return self.coords[2]

    @property
    def copy(self) -> int:
        """Index of this rank among those with the same tensor shard of a stage."""
        d, _, _, c = self.coords
        return self.layout.copy_index(d, c)

    @property
    def e(self) -> int:
        """Expert index of this rank: which part of each layer's experts it has."""
        return self.copy % self.expert

    def is_first_copy(self, *, of_experts: bool) -> bool:
        """Return whether this is the first of the ranks with the same weights, or with the same experts."""
        return self.copy < self.expert if of_experts else self.copy == 0

    def ranks_of_copy(self, *, of_experts: bool) -> list[int]:
        """Return the ranks that hold one copy of the model together with this one, or of its experts."""
        stages, shards = range(self.pipe), range(self.tensor)
        first = self.copy - self.e if of_experts else self.copy
        copies = range(first, first + self.expert) if of_experts else (first,)
        places = [divmod(copy, self.context) for copy in copies]
        return [
            self.layout.rank(RankOrder.TRAIN, d, t, p, c) for p in stages for d, c in places for t in shards
        ]

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
        return self.t == self.coords[3] == 0 and self.is_last_stage

    def tensor_block(self, size: int) -> ProcessGroup:
        """Return the group of the `size` neighbouring tensor ranks that include this one; a collective."""
        first = self.group.rank() - self.t % size
        return self._made.of(range(first, first + size))


_known_states: list[ParallelState] = []
"""The states of this process. All ranks of a replica make the same ones, in the same order."""


def _collection(
    made: RankGroups, layout: Layout, coords: Coords
) -> tuple[ProcessGroupCollection, ProcessGroup]:
    """Return the groups under megatron's names, and the group of this rank's data index.

    Tensor ranks divide the rows of experts as they divide those of an MLP.
    """
    d, t, p, c = coords

    def group(data: bool = False, tensor: bool = False, pipe: bool = False, context: bool = False) -> Any:
        """Return the group of the ranks that differ from this one in some axes only."""
        free = (data, tensor, pipe, context)
        indices = [
            range(n) if is_free else [i] for n, i, is_free in zip(layout.sizes, coords, free, strict=True)
        ]
        return made.of(sorted(layout.rank(RankOrder.TRAIN, *at) for at in itertools.product(*indices)))

    block, index = divmod(layout.copy_index(d, c), layout.expert)

    def expert_group(peers: Iterable[int], tensor: bool = False, pipe: bool = False) -> Any:
        """Return the group of the ranks with these copy indices that differ from this one in some axes."""
        shards = range(layout.tensor) if tensor else [t]
        stages = range(layout.pipe) if pipe else [p]
        ranks = (
            layout.rank(RankOrder.TRAIN, copy // layout.context, shard, stage, copy % layout.context)
            for stage, copy, shard in itertools.product(stages, peers, shards)
        )
        return made.of(sorted(ranks))

    neighbours = range(block * layout.expert, (block + 1) * layout.expert)
    same_experts = range(index, layout.num_copies, layout.expert)
    tp, dp, copies = group(tensor=True), group(data=True), group(data=True, context=True)
    pp, cp = group(pipe=True), group(context=True)
    ends = None
    if p in (0, layout.pipe - 1):
        ends = made.of([layout.rank(RankOrder.TRAIN, d, t, end, c) for end in sorted({0, layout.pipe - 1})])
    else:
        made.make_unused()
    collection = ProcessGroupCollection(
        tp=tp,
        dp=dp,
        pp=pp,
        mp=group(tensor=True, pipe=True),
        embd=ends,
        pos_embd=None,
        dp_cp=copies,
        intra_dp_cp=copies,
        intra_dist_opt=group(data=True, tensor=True, pipe=True, context=True),
        tp_cp=group(tensor=True, context=True),
        tp_dp_cp=group(data=True, tensor=True, context=True),
        cp=cp,
        ep=expert_group(neighbours),
        expt_tp=tp,
        expt_dp=expert_group(same_experts),
        intra_expt_dp=expert_group(same_experts),
        tp_ep=expert_group(neighbours, tensor=True),
        tp_ep_pp=expert_group(neighbours, tensor=True, pipe=True),
    )
    return collection, group(tensor=True, pipe=True, context=True)


def _single_rank_group() -> ProcessGroup:
    """Return a group of this process alone; makes a world of one process if there is none."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    made = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    return made
