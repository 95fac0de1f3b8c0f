"""`redistribute`: which worker pulls which fields of which samples from which other worker.

It is a pure function of the plan's rule and of where the data is. The planner calls it with sampled lengths,
the executor in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.rows import EdgeRule

NO_WORKER = -1
NUM_CHOICES = 128
"""How often the workers that send least are chosen anew, for all samples of a node."""

Integers = NDArray[np.signedinteger]


@dataclass(frozen=True, eq=False)
class FieldHolders:
    """Fields that the same workers hold."""

    fields: tuple[str, ...]
    """`stream/field` names."""
    workers: Integers
    """[most holders of one, samples]: the workers whose stores have them, and `NO_WORKER` in other places."""


@dataclass(frozen=True, eq=False)
class Holders:
    """The samples of a batch, and the workers that have their fields."""

    samples: Integers
    """[samples]: ids, ascending."""
    tokens: Integers
    """[samples]"""
    groups: tuple[FieldHolders, ...]

    def rows(self, samples: Integers) -> Integers:
        """Return the rows of samples."""
        return np.searchsorted(self.samples, samples)


Shards = tuple[tuple[tuple[int, ...], ...], ...]
"""dp index -> minibatches -> sample ids, ascending. A node that does not train has one minibatch."""


class Move(NamedTuple):
    """Fields of samples that one worker pulls from another worker's store."""

    src: int
    dst: int
    samples: tuple[int, ...]
    fields: tuple[str, ...]
    """`stream/field` names."""


@dataclass(frozen=True, eq=False)
class Moves:
    """Moves in columns, with a row for each sample of each move.

    Of thousands of workers, most moves are of one sample, and a `Move` of each would take the controller more
    time than everything else that it does for a batch node.
    """

    samples: Integers
    """[rows]"""
    src: Integers
    """[rows]"""
    dst: Integers
    """[rows]"""
    kind: Integers
    """[rows]: number of the fields that move."""
    fields: tuple[tuple[str, ...], ...]
    """Kind -> `stream/field` names."""

    @classmethod
    def of(cls, moves: Iterable[Move]) -> Moves:
        """Return moves in columns, in their order."""
        moves = tuple(moves)
        fields = tuple(dict.fromkeys(move.fields for move in moves))
        rows = [(s, move.src, move.dst, fields.index(move.fields)) for move in moves for s in move.samples]
        samples, src, dst, kind = np.array(rows, np.int64).reshape(-1, 4).T
        return cls(samples, src, dst, kind, fields)

    def joined(self) -> tuple[Move, ...]:
        """Return the moves, each with all neighbouring rows of the same source, destination and fields."""
        columns = np.stack((self.src, self.dst, self.kind)).astype(np.int64)
        starts = np.flatnonzero(np.diff(columns, axis=1, prepend=-1).any(axis=0))
        samples, ends = self.samples.tolist(), pairwise((*starts.tolist(), len(self.samples)))
        return tuple(
            Move(src, dst, tuple(samples[start:end]), self.fields[kind])
            for (start, end), src, dst, kind in zip(ends, *columns[:, starts].tolist(), strict=True)
        )

    def by_destination(self) -> dict[int, Moves]:
        """Return destination -> its moves, in their order: one message, whichever workers send."""
        order = np.argsort(self.dst, kind="stable")
        found, starts = np.unique(self.dst[order], return_index=True)
        parts = np.split(order, starts[1:])
        return {dst: self._part(part) for dst, part in zip(found.tolist(), parts, strict=False)}

    @property
    def sources(self) -> set[int]:
        """Workers that send."""
        return set(np.unique(self.src).tolist())

    def _part(self, rows: Integers) -> Moves:
        """Return some rows, with as few bytes for a number as they need."""
        columns = [column[rows] for column in (self.samples, self.src, self.dst, self.kind)]
        samples, src, dst, kind = (column.astype(np.min_scalar_type(column.max())) for column in columns)
        return Moves(samples, src, dst, kind, self.fields)


def redistribute(rule: EdgeRule, assignment: Shards, holders: Holders, cluster: ClusterSpec) -> Moves:
    """Plan the moves after which every dp-head holds what its rank reads.

    Data that a dp-head already holds does not move, and nothing moves twice. The source of a move is a
    holder on the dp-head's machine if there is one, and among these the one that sends least so far. Fields
    with the same source, destination and samples share one move. Moves are sorted by source, destination,
    fields and sample.

    What each worker sends is counted in fields, first for all samples without a choice. It is counted anew
    after each of `NUM_CHOICES` parts of the other samples: of few samples, after each.

    Args:
        rule: fields and dp-heads of the consumer.
        assignment: the samples of each dp rank.
        holders: the workers that have the fields now; every sample of the assignment has a holder.
        cluster: says which workers share a machine.
    """
    dsts, rows = _reads(rule, assignment, holders)
    samples, groups = holders.samples[rows], holders.groups
    nowhere = np.full((max((1, *(len(group.workers) for group in groups))), 0), NO_WORKER)
    lacking, options = [np.arange(0)], [nowhere]
    for group in groups:
        workers = group.workers[:, rows]
        lacks = np.flatnonzero((workers != dsts).all(axis=0))
        workers = workers[:, lacks]
        has = workers != NO_WORKER
        is_near = has & (workers // cluster.devices_per_node == dsts[lacks] // cluster.devices_per_node)
        has &= is_near | ~is_near.any(axis=0)
        missing = samples[lacks[~has.any(axis=0)]]
        assert not len(missing), f"no worker holds {', '.join(group.fields)} of sample {missing[0]}"
        width = ((0, len(nowhere) - len(workers)), (0, 0))
        lacking.append(lacks)
        options.append(np.pad(np.where(has, workers, NO_WORKER), width, constant_values=NO_WORKER))
    number = np.repeat(np.arange(len(groups)), [len(lacks) for lacks in lacking[1:]])
    num_fields = np.array([len(group.fields) for group in groups], np.int64)[number]
    src = _choose(np.concatenate(options, axis=1), num_fields, cluster.num_devices)
    return _join(samples, dsts, np.concatenate(lacking), src, number, [group.fields for group in groups])


def _reads(rule: EdgeRule, assignment: Shards, holders: Holders) -> tuple[Integers, Integers]:
    """Return dp-heads and the rows of the samples that they read. Several ranks may share a dp-head."""
    counts = [sum(map(len, minibatches)) for minibatches in assignment]
    samples = np.fromiter(chain.from_iterable(chain.from_iterable(assignment)), np.int64)
    dsts = np.repeat(np.asarray(rule.heads, np.int64), counts)
    num_rows = len(holders.samples)
    reads = np.sort(dsts * num_rows + holders.rows(samples))
    return np.divmod(reads[np.diff(reads, prepend=-1) != 0], max(1, num_rows))


def _choose(options: Integers, num_fields: Integers, num_workers: int) -> Integers:
    """Return the worker of each column that has sent least, and the first of several."""
    chosen: Integers = options.max(axis=0)
    has_choice = (options != NO_WORKER).sum(axis=0) > 1
    sent = np.append(np.zeros(num_workers), np.inf)
    sent += np.bincount(chosen[~has_choice], num_fields[~has_choice], num_workers + 1)
    choices = np.flatnonzero(has_choice)
    options = options[:, choices]
    options = np.sort(np.where(options == NO_WORKER, num_workers, options), axis=0)
    for first in range(min(NUM_CHOICES, len(choices))):
        part = slice(first, None, NUM_CHOICES)  # samples of all dp-heads, which have other options
        least = sent[options[:, part]].argmin(axis=0)
        sources, columns = np.take_along_axis(options[:, part], least[None], axis=0)[0], choices[part]
        chosen[columns] = sources
        sent += np.bincount(sources, num_fields[columns], num_workers + 1)
    return chosen


def _join(
    samples: Integers,
    dsts: Integers,
    read: Integers,
    src: Integers,
    number: Integers,
    names: Sequence[tuple[str, ...]],
) -> Moves:
    """Return the moves, sorted by source, destination, fields and sample.

    Args:
        samples: the sample of each read, ascending by dp-head and sample.
        dsts: the dp-head of each read.
        read: number of the read, for each group of fields that its dp-head lacks.
        src: the worker that sends these fields.
        number: number of the group of fields.
        names: the fields of each group.
    """
    if not len(read):
        return Moves.of(())
    assert len(names) < 64, "a bit of 64 is a group of fields"
    span = 1 + max(src.max(), dsts.max())
    pairs = read * span + src
    order = np.argsort(pairs, kind="stable")
    starts = np.flatnonzero(np.diff(pairs[order], prepend=-1))
    sent = np.bitwise_or.reduceat(1 << number[order], starts)
    read, src = np.divmod(pairs[order[starts]], span)
    kinds, kind = np.unique(sent, return_inverse=True)
    fields = [tuple(sorted(chain(*(n for i, n in enumerate(names) if k >> i & 1)))) for k in kinds.tolist()]
    by_fields = sorted(range(len(fields)), key=fields.__getitem__)
    place = np.empty(len(fields), np.int64)
    place[by_fields] = np.arange(len(fields))
    order = np.argsort((src * span + dsts[read]) * len(kinds) + place[kind], kind="stable")
    moved, kind = read[order], place[kind[order]]
    return Moves(samples[moved], src[order], dsts[moved], kind, tuple(fields[n] for n in by_fields))
