"""Losses of every reduction, written out by hand, and the calls that must give them.

The entries of a loss are numbers of the batch, so that the expected loss needs no model; the gradient of
each entry is that of a log-prob.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch_kit as kit

from hflow.data.batches.batch import Batch, Column
from hflow.training.interface import NodeCall, TrainShard
from hflow.types import Unit

LENGTHS = [5, 9, 3, 1, 12, 4, 7, 2, 6, 6]
"""Tokens of each sequence. The fourth has one token, so nothing of it is learned."""
GROUPS = [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]
MASKS = ("none", "samples", "groups", "tokens")
REDUCTIONS = {
    "token-mean": Unit.TOKEN,
    "token-sum/50": Unit.TOKEN,
    "seq-mean-token-sum": Unit.TOKEN,
    "seq-mean-token-mean": Unit.TOKEN,
    "seq-mean": Unit.SEQUENCE,
    "group-mean": Unit.GROUP,
}
MINIBATCHES = {1: [list(range(10))], 3: [[0, 1, 2, 5, 6], [3, 4], [7, 8, 9]]}
"""Number of minibatches -> the rows of each. Unequal, so that a mean over the step gives another loss."""
HALVES = {1: [([0, 1, 2], [3, 4, 5, 6, 7, 8, 9])], 3: [([0, 1, 2], [5, 6]), ([], [3, 4]), ([7, 8, 9], [])]}
"""The same rows on two ranks; a rank may have no sample of a minibatch."""
CASES = list(itertools.product(REDUCTIONS, MASKS, MINIBATCHES))


def make_batch() -> Batch:
    """Return sequences with random entries per token, sequence and group, and three masks."""
    rng = np.random.default_rng(5)
    total, groups = sum(LENGTHS), np.array(GROUPS)
    learned = rng.random(total) < 0.7
    rows = np.arange(len(LENGTHS))
    columns = {
        "input_ids": Column(Unit.TOKEN, rng.integers(0, kit.VOCAB, total)),
        "loss_mask": Column(Unit.TOKEN, learned),
        "token_entry": Column(Unit.TOKEN, rng.normal(size=total).astype(np.float32)),
        "sequence_entry": Column(Unit.SEQUENCE, rng.normal(size=len(rows)).astype(np.float32)),
        "group_entry": Column(Unit.SEQUENCE, rng.normal(size=4).astype(np.float32)[groups]),
        "samples": Column(Unit.SEQUENCE, rows % 3 != 1),
        "groups": Column(Unit.SEQUENCE, groups != 2),
        "tokens": Column(Unit.TOKEN, rng.random(total) < 0.5),
    }
    return Batch(rows, groups, np.array(LENGTHS), columns)


def call_of(reduction: str, mask: str) -> NodeCall:
    """Return a train call whose loss has the batch's entries as values."""
    bodies = {Unit.TOKEN: _token_loss, Unit.SEQUENCE: _sequence_loss, Unit.GROUP: _group_loss}
    unit = REDUCTIONS[reduction]
    options = {} if mask == "none" else {"mask": mask}
    return kit.call(bodies[unit], str(unit), [kit.read(f"{unit}_entry", unit)], reduce=reduction, **options)


def _token_loss(out, token_entry):
    return out.logprobs - out.logprobs.detach() + token_entry


def _sequence_loss(out, seqs, sequence_entry):
    return seqs.sum(out.logprobs - out.logprobs.detach()) + sequence_entry


def _group_loss(out, seqs, group_entry):
    return seqs.group_sum(seqs.sum(out.logprobs - out.logprobs.detach())) + group_entry


def shards_of(batch: Batch, num_minibatches: int, num_ranks: int) -> list[TrainShard]:
    """Return what each of the ranks trains."""
    if num_ranks == 1:
        return [TrainShard(tuple(batch.take(rows) for rows in MINIBATCHES[num_minibatches]))]
    halves = HALVES[num_minibatches]
    return [TrainShard(tuple(batch.take(pair[rank]) for pair in halves)) for rank in (0, 1)]


@dataclass(frozen=True)
class _Row:
    group: int
    tokens: list[float]
    """Entries of the tokens that count."""
    sequence_entry: float
    group_entry: float


def loss_by_hand(batch: Batch, reduction: str, mask: str, num_minibatches: int) -> float:
    """Return the loss of a step: the mean over its minibatches, each divided by its own count."""
    losses = []
    for rows in MINIBATCHES[num_minibatches]:
        counted = [row for row in (_row(batch, index, mask) for index in rows) if row.tokens]
        if counted:  # a minibatch without learned tokens makes no update
            losses.append(_minibatch_loss(counted, reduction))
    return sum(losses) / len(losses)


def _row(batch: Batch, index: int, mask: str) -> _Row:
    columns = {name: column.values for name, column in batch.columns.items()}
    start, end = batch.offsets[index], batch.offsets[index + 1]
    kept = {"none": True, "samples": columns["samples"][index], "groups": columns["groups"][index]}
    counts = [
        bool(columns["loss_mask"][t]) and t > start and kept.get(mask, columns["tokens"][t])
        for t in range(start, end)
    ]
    return _Row(
        int(batch.groups[index]),
        [
            float(columns["token_entry"][t])
            for t, count in zip(range(start, end), counts, strict=True)
            if count
        ],
        float(columns["sequence_entry"][index]),
        float(columns["group_entry"][index]),
    )


def _minibatch_loss(rows: list[_Row], reduction: str) -> float:
    sums = [sum(row.tokens) for row in rows]
    if reduction == "token-mean":
        return sum(sums) / sum(len(row.tokens) for row in rows)
    if reduction == "token-sum/50":
        return sum(sums) / 50
    if reduction == "seq-mean-token-sum":
        return sum(sums) / len(rows)
    if reduction == "seq-mean-token-mean":
        return sum(total / len(row.tokens) for total, row in zip(sums, rows, strict=True)) / len(rows)
    if reduction == "seq-mean":
        return sum(row.sequence_entry for row in rows) / len(rows)
    by_group = {row.group: row.group_entry for row in rows}
    return sum(by_group.values()) / len(by_group)
