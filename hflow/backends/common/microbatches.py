"""Which micro-batches a rank runs, and the global counts that its losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hflow.backends.common.inputs import count_entries, prepare
from hflow.backends.interface import NodeCall, TrainShard
from hflow.data.batch import Batch
from hflow.data.packing import pack
from hflow.types import Unit

_UNITS = (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP)


@dataclass(frozen=True)
class Minibatch:
    """The part of one minibatch that a rank has, prepared and cut into micro-batches."""

    microbatches: tuple[Batch, ...]
    num_microbatches: int
    """The most that any rank has: all run that many, the others' being empty."""
    totals: dict[Unit, int]
    """Entries that count in the whole minibatch, over all ranks."""


@dataclass(frozen=True)
class MicrobatchSplitter:
    """How a rank cuts what it is given."""

    tokens: int
    """Budget of a micro-batch."""
    head: str
    group: ProcessGroup | None
    device: torch.device

    def minibatches(self, call: NodeCall, shards: Sequence[TrainShard]) -> list[Minibatch]:
        """Cut every minibatch of a step, and agree with the other ranks (one collective).

        Several shards in one process are one rank's samples: no result depends on the split.
        """
        mask = call.options.get("mask")
        parts = [
            [prepare(part, self.head, mask) for part in parts if len(part)]
            for parts in zip(*(shard.minibatches for shard in shards), strict=True)
        ]
        merged = [Batch.concat(part) if part else None for part in parts]
        cuts = [self.cut(call, batch) for batch in merged]
        agreed = self._agree(merged, cuts)
        return [
            Minibatch(tuple(cut), most, dict(zip(_UNITS, totals, strict=True)))
            for cut, (most, *totals) in zip(cuts, agreed, strict=True)
        ]

    def cut(self, call: NodeCall, batch: Batch | None) -> list[Batch]:
        """Micro-batches of at most `tokens` tokens; whole groups where the body makes or reads groups."""
        return [] if batch is None else [batch.take(rows) for rows in self.rows(call, batch)]

    def rows(self, call: NodeCall, batch: Batch) -> list[list[int]]:
        """Rows of each micro-batch. Groups that fit into one stay together, as they share a prompt."""
        by_group = any(unit == Unit.GROUP for _, unit in call.returns)
        by_group = by_group or any(read.field == "group" for read in call.reads)
        return pack(batch.lengths, self.tokens, batch.groups if by_group else self._fitting(batch))

    def _fitting(self, batch: Batch) -> npt.NDArray[np.int64]:
        """A label for each row: its group's where the whole group fits the budget, else one of its own."""
        _, index = np.unique(batch.groups, return_inverse=True)
        fits = np.bincount(index, weights=batch.lengths) <= self.tokens
        return np.where(fits[index], index, len(index) + np.arange(len(index)))

    def most(self, num_microbatches: int) -> int:
        """The largest of all ranks' numbers of micro-batches (a collective)."""
        return int(self._gather([[num_microbatches]]).amax())

    def _agree(self, merged: list[Batch | None], cuts: list[list[Batch]]) -> list[list[int]]:
        """For each minibatch: the most micro-batches, and the sums of the counts."""
        counts = [dict.fromkeys(_UNITS, 0) if b is None else count_entries(b) for b in merged]
        mine = [[len(cut), *(count[u] for u in _UNITS)] for cut, count in zip(cuts, counts, strict=True)]
        everyone = self._gather(mine)
        agreed = torch.cat([everyone[:, :, :1].amax(0), everyone[:, :, 1:].sum(0)], dim=1)
        return [[int(x) for x in row] for row in agreed.tolist()]

    def _gather(self, rows: list[list[int]]) -> torch.Tensor:
        """The integers of all ranks, `[ranks, ...]`."""
        mine = torch.tensor(rows, dtype=torch.int64, device=self.device)
        if self.group is None:
            return mine[None]
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        return torch.stack(parts)
