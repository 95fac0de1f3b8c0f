"""Micro-batches: which samples share a forward pass, and the global counts that losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hflow.data.batches.batch import Batch
from hflow.data.batches.device_copy import to_device
from hflow.data.batches.shared_prefix import shared_tokens
from hflow.training.interface import NodeCall, TrainShard
from hflow.training.loop.inputs import (
    compared_columns,
    count_observed,
    count_valid,
    cut,
    prepare_batch,
    target_positions,
)
from hflow.types import Unit

_UNITS = (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP)


@dataclass(frozen=True)
class Minibatch:
    """One rank's sequences of a minibatch, prepared and split into micro-batches."""

    microbatches: tuple[Batch, ...]
    num_microbatches: int
    """The largest number on any rank. Every rank runs this many forward passes, the surplus ones on
    placeholders."""
    totals: dict[Unit, int]
    """Tokens, samples and groups that count in the whole minibatch, over all ranks."""
    num_observed: int = 0
    """Observed tokens of the whole minibatch, over all ranks."""


@dataclass(frozen=True)
class MicrobatchSplitter:
    """Splits a rank's samples into micro-batches, in agreement with the other data indices."""

    max_tokens: int
    """Budget of a micro-batch: tokens that are computed. A prompt that samples of a group share counts once,
    unless it has images."""
    head: str
    group: ProcessGroup | None
    """One rank for each data index; None for one."""
    device: torch.device

    def minibatches(self, call: NodeCall, shards: Sequence[TrainShard]) -> list[Minibatch]:
        """Split every minibatch of a step; one collective.

        Several shards in one process are merged, as no result depends on which rank has a sample.
        """
        mask, observed = call.options.get("mask"), call.options.get("observed")
        prepared = [
            [prepare_batch(cut(call, part), self.head, mask, observed) for part in parts if len(part)]
            for parts in zip(*(shard.minibatches for shard in shards), strict=True)
        ]
        merged = [Batch.concat(parts) if parts else None for parts in prepared]
        splits = [self.split(call, batch) for batch in merged]
        agreed = self._agree(merged, splits)
        return [
            Minibatch(tuple(split), num_microbatches, dict(zip(_UNITS, totals, strict=True)), num_observed)
            for split, (num_microbatches, num_observed, *totals) in zip(splits, agreed, strict=True)
        ]

    def split(self, call: NodeCall, batch: Batch | None) -> list[Batch]:
        """Return the micro-batches of a batch."""
        return [] if batch is None else [batch.take(rows) for rows in self.rows(call, batch)]

    def rows(self, call: NodeCall, batch: Batch) -> list[list[int]]:
        """Return the rows of each micro-batch, of at most `max_tokens` computed tokens.

        A group stays in one micro-batch if `keeps_groups_whole`, even if it exceeds the budget; otherwise if
        it fits. What does not fit is split into as few parts as possible, each of which computes the prompt.
        """
        if batch.num_tokens <= self.max_tokens:
            return [list(range(len(batch)))]
        shared = _shared_prompts(call, batch)
        units = batch.groups if call.keeps_groups_whole else self._parts_of_groups(batch, shared)
        return pack_sequences(batch.lengths, self.max_tokens, units, shared)

    def _parts_of_groups(self, batch: Batch, shared: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return a label for each row: equal for rows of a group that share a micro-batch."""
        labels = np.empty(len(batch), dtype=np.int64)
        count = 0
        for rows in _units(len(batch), batch.groups):
            prompt = shared[rows[0]]
            parts = pack_sequences(batch.lengths[rows] - prompt, self.max_tokens - prompt)
            if not prompt and len(parts) > 1:
                parts = [[row] for row in range(len(rows))]
            for part in parts:
                labels[rows[part]], count = count, count + 1
        return labels

    def max_over_ranks(self, num_microbatches: int) -> int:
        """Return the largest number of micro-batches on any rank; a collective."""
        return int(self._gather([[num_microbatches]]).amax())  # waits: once per infer node

    def _agree(self, merged: list[Batch | None], splits: list[list[Batch]]) -> list[list[int]]:
        """Return for each minibatch the largest number of micro-batches, and the counts of all ranks."""
        counts = [[0] * (1 + len(_UNITS)) if b is None else _counts(b) for b in merged]
        local_counts = [[len(split), *count] for split, count in zip(splits, counts, strict=True)]
        by_rank = self._gather(local_counts)
        agreed = torch.cat([by_rank[:, :, :1].amax(0), by_rank[:, :, 1:].sum(0)], dim=1)
        return [[int(x) for x in row] for row in agreed.tolist()]  # waits: once per step

    def _gather(self, rows: list[list[int]]) -> torch.Tensor:
        """Return the integers of all ranks, `[ranks, ...]`."""
        if self.group is None:
            return torch.tensor([rows], dtype=torch.int64)
        local_counts = to_device(torch.tensor(rows, dtype=torch.int64), self.device)
        parts = [torch.empty_like(local_counts) for _ in range(self.group.size())]
        dist.all_gather(parts, local_counts, group=self.group)
        return torch.stack(parts)


def _counts(batch: Batch) -> list[int]:
    valid = count_valid(batch)
    return [count_observed(batch), *(valid[unit] for unit in _UNITS)]


Integers = Sequence[int] | npt.NDArray[np.int64]


def _shared_prompts(call: NodeCall, batch: Batch) -> npt.NDArray[np.int64]:
    """Return the number of tokens that a prepared batch's groups compute once, for each row.

    Those from a group's first target on do not count: the output matrix has a row for each of them. A batch
    with images has none, since equal tokens may be different images.
    """
    if any(column.unit is Unit.PIXELS for column in batch.columns.values()):
        return np.zeros(len(batch), dtype=np.int64)
    targets = target_positions(batch)
    next_target = np.append(targets, batch.num_tokens)[np.searchsorted(targets, batch.offsets[:-1])]
    _, group = np.unique(batch.groups, return_inverse=True)
    unlearned = np.full(len(batch), batch.num_tokens)
    np.minimum.at(unlearned, group, next_target - batch.offsets[:-1])
    shared: npt.NDArray[np.int64] = np.minimum(shared_tokens(batch, compared_columns(call)), unlearned[group])
    return shared


def pack_sequences(
    lengths: Integers, budget: int, keep_together: Integers | None = None, shared: Integers | None = None
) -> list[list[int]]:
    """Split sequences into micro-batches of at most `budget` tokens by first-fit decreasing.

    Args:
        lengths: tokens of each sequence.
        budget: maximum tokens of a micro-batch. A unit that is longer is a micro-batch of its own.
        keep_together: a label for each sequence. Sequences with equal labels form a unit, which is not split.
        shared: how many of each sequence's tokens its unit has in common, so that they count once; None: 0.

    Returns:
        Row indices of each micro-batch, ascending; the micro-batches are ordered by their first row. There
        are at most twice as many micro-batches as necessary, and usually a few per cent more.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and sizes.sum() <= budget:
        return [list(range(len(sizes)))]
    units, counted_once = _units(len(sizes), keep_together), np.zeros(len(sizes), dtype=np.int64)
    if shared is not None:
        counted_once = np.asarray(shared, dtype=np.int64)
    totals = np.array(
        [sizes[unit].sum() - (len(unit) - 1) * counted_once[unit[0]] for unit in units], dtype=np.int64
    )
    bins = [
        np.sort(np.concatenate([units[index] for index in members])).tolist()
        for members in _first_fit_decreasing(totals, budget)
    ]
    return sorted(bins, key=lambda rows: rows[0])


def _units(count: int, labels: Integers | None) -> list[npt.NDArray[np.int64]]:
    """Return the rows of each unit."""
    if labels is None:
        return list(np.arange(count, dtype=np.int64)[:, None])
    order = np.argsort(np.asarray(labels), kind="stable")
    cuts = np.flatnonzero(np.diff(np.asarray(labels)[order])) + 1
    return np.split(order, cuts) if count else []


def _first_fit_decreasing(sizes: npt.NDArray[np.int64], budget: int) -> list[list[int]]:
    """Return indices of `sizes` by bin: the largest first, each into the first bin with room for it."""
    free = np.zeros(len(sizes), dtype=np.int64)
    bins: list[list[int]] = []
    for index in np.argsort(-sizes, kind="stable"):
        fits = np.flatnonzero(free[: len(bins)] >= sizes[index])
        if len(fits) == 0:
            free[len(bins)] = max(budget - sizes[index], 0)
            bins.append([int(index)])
        else:
            free[fits[0]] -= sizes[index]
            bins[fits[0]].append(int(index))
    return bins
