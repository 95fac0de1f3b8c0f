"""Bytes of a redistribution beside their lower bound, and its moves as collective steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hflow.plan.ir import EdgeRule
from hflow.plan.redistribute import Holders, Move

FieldBytes = Mapping[str, Mapping[int, int]]
"""Field (`stream/field`) -> sample -> bytes."""


def moved_bytes(moves: Iterable[Move], nbytes: FieldBytes) -> int:
    """Bytes that moves carry."""
    return sum(nbytes[field][s] for move in moves for field in move.fields for s in move.samples)


def lower_bound_bytes(
    rule: EdgeRule, tokens: Mapping[int, int], nbytes: FieldBytes, holders: Holders, capacity: int
) -> int:
    """Bytes that any assignment must move whose ranks take at most `capacity` tokens each.

    A byte stays only where its sample is assigned to a holder. So what stays is at most (a) every
    sample at its best rank, and (b) for each rank the best choice of held samples that fits into
    its capacity, relaxed to a fractional knapsack (Dantzig, 1957). The bound takes the smaller.

    Args:
        rule: fields and heads of the consumer.
        tokens: tokens of each sample to assign.
        nbytes: bytes of each field of each sample.
        holders: where the fields lie before.
        capacity: tokens of the heaviest rank, 0 or more.
    """
    total = sum(nbytes[field][sample] for field in rule.fields for sample in tokens)
    held = _held(rule, tokens, nbytes, holders)
    best: dict[int, int] = defaultdict(int)
    for of_worker in held.values():
        for sample, size in of_worker.items():
            best[sample] = max(best[sample], size)
    best_fill = sum(_knapsack(held[head], tokens, capacity) for head in rule.heads)
    return total - min(sum(best.values()), best_fill)


def _held(
    rule: EdgeRule, samples: Iterable[int], nbytes: FieldBytes, holders: Holders
) -> dict[int, dict[int, int]]:
    """Head -> sample -> bytes of its fields that the head's worker holds, where there are any."""
    held: dict[int, dict[int, int]] = {head: defaultdict(int) for head in rule.heads}
    places = [(nbytes[field], holders[field]) for field in rule.fields]
    for sample in samples:
        for sizes, at in places:
            for worker in at.get(sample, ()):
                if worker in held:
                    held[worker][sample] += sizes[sample]
    return held


def _knapsack(value: Mapping[int, int], weight: Mapping[int, int], capacity: int) -> int:
    """The value of the best fractional choice within the capacity, rounded down."""
    free = sum(value[s] for s in value if weight[s] == 0)
    worth = sorted((s for s in value if value[s] and weight[s]), key=lambda s: -value[s] / weight[s])
    kept, room = free, capacity
    for s in worth:
        if weight[s] > room:
            return kept + value[s] * room // weight[s]
        kept, room = kept + value[s], room - weight[s]
    return kept


@dataclass(frozen=True)
class CollectiveStep:
    """Moves that together are one collective, for people to read.

    `bcast`: one source sends the same to several; `scatter`: one source sends different samples
    to several; `gather`: one destination receives from all its sources.
    """

    kind: Literal["bcast", "scatter", "gather"]
    root: int
    moves: tuple[Move, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """Workers that send."""
        return tuple(sorted({move.src for move in self.moves}))

    @property
    def destinations(self) -> tuple[int, ...]:
        """Workers that receive."""
        return tuple(sorted({move.dst for move in self.moves}))

    @property
    def samples(self) -> tuple[int, ...]:
        """Samples that move."""
        return tuple(sorted({sample for move in self.moves for sample in move.samples}))

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that move."""
        return tuple(sorted({field for move in self.moves for field in move.fields}))


def collective_steps(moves: Sequence[Move]) -> tuple[CollectiveStep, ...]:
    """Classify moves as broadcasts, scatters and gathers; every move is in exactly one step."""
    steps, rest = [], []
    for same in _by(moves, lambda move: (move.src, move.samples, move.fields)):
        if len(same) > 1:
            steps.append(CollectiveStep("bcast", same[0].src, same))
        else:
            rest.append(same[0])
    single: list[Move] = []
    for same in _by(rest, lambda move: move.src):
        if len({move.dst for move in same}) > 1:
            steps.append(CollectiveStep("scatter", same[0].src, same))
        else:
            single.extend(same)
    steps += [CollectiveStep("gather", same[0].dst, same) for same in _by(single, lambda move: move.dst)]
    return tuple(steps)


def _by(moves: Iterable[Move], key: Callable[[Move], Hashable]) -> list[tuple[Move, ...]]:
    """Moves with the same key together, in the order of their first."""
    together: dict[Hashable, list[Move]] = defaultdict(list)
    for move in moves:
        together[key(move)].append(move)
    return [tuple(same) for same in together.values()]
