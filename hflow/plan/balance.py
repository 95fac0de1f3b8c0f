"""`assign`: which dp rank gets which samples. Locality first, as far as balance permits."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence, Set
from dataclasses import dataclass

SLACK = 0.005
"""A rank may hold this fraction more than the mean for the sake of locality."""
NUM_REPAIRS_PER_RANK = 4
NUM_SWAP_CANDIDATES = 64


@dataclass(frozen=True)
class Load:
    """What is assigned as a whole: a sample, or a group whose members must stay together."""

    id: int
    tokens: int


def assign(units: Sequence[Load], num_ranks: int, holders: Sequence[Set[int]]) -> tuple[tuple[int, ...], ...]:
    """Assign units to ranks, moving as few tokens as balance permits. Deterministic.

    The limit of a rank is the heaviest load of the longest-first schedule (LPT: Graham, 1969), or
    the mean and `SLACK` where that is more. Units stay with a holder up to the limit, the longest
    first, so that what has to move is short and fills gaps well. No rank ends above the limit.

    Args:
        units: what to assign, with distinct ids.
        num_ranks: number of ranks.
        holders: for each unit, the ranks that hold its data.

    Returns:
        For each rank the ids of its units, ascending.
    """
    order = sorted(range(len(units)), key=lambda u: (-units[u].tokens, units[u].id))
    tokens = [unit.tokens for unit in units]
    limit = _limit([tokens[u] for u in order], num_ranks)
    rank_of, loads = _stay(order, tokens, holders, num_ranks, limit)
    _fill([u for u in order if u not in rank_of], tokens, loads, rank_of)
    _repair(order, tokens, loads, rank_of, limit)
    if max(loads) > limit:
        rank_of = {}
        _fill(order, tokens, [0] * num_ranks, rank_of)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for u, rank in rank_of.items():
        ranks[rank].append(units[u].id)
    return tuple(tuple(sorted(ids)) for ids in ranks)


def _limit(descending: Sequence[int], num_ranks: int) -> float:
    loads = [0] * num_ranks
    for size in descending:
        heapq.heapreplace(loads, loads[0] + size)
    return max(max(loads), (1 + SLACK) * sum(descending) / num_ranks)


def _stay(
    order: Sequence[int], tokens: Sequence[int], holders: Sequence[Set[int]], num_ranks: int, limit: float
) -> tuple[dict[int, int], list[int]]:
    """Keep units with their least loaded holder up to the limit; those with a choice come last."""
    loads = [0] * num_ranks
    rank_of: dict[int, int] = {}
    bound = [u for u in order if len(holders[u]) == 1]
    free = [u for u in order if len(holders[u]) > 1]
    for u in (*bound, *free):
        load, rank = min((loads[rank], rank) for rank in holders[u])
        if load + tokens[u] <= limit:
            rank_of[u] = rank
            loads[rank] += tokens[u]
    return rank_of, loads


def _fill(rest: Sequence[int], tokens: Sequence[int], loads: list[int], rank_of: dict[int, int]) -> None:
    """Give what is left to the least loaded rank, the longest first."""
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for u in rest:
        load, rank = heap[0]
        rank_of[u] = rank
        loads[rank] = load + tokens[u]
        heapq.heapreplace(heap, (loads[rank], rank))


def _repair(
    order: Sequence[int], tokens: Sequence[int], loads: list[int], rank_of: dict[int, int], limit: float
) -> None:
    """Shift or swap units away from the heaviest rank until the limit holds or nothing helps.

    Needed where units are few and long, so that what had to leave no longer fits anywhere.
    """
    if max(loads) <= limit:
        return
    place = {u: i for i, u in enumerate(order)}
    members: list[list[int]] = [[] for _ in loads]
    for u in order:
        members[rank_of[u]].append(u)
    for _ in range(NUM_REPAIRS_PER_RANK * len(loads)):
        heavy = loads.index(max(loads))
        change = _first_exchange(members, tokens, loads, heavy) if loads[heavy] > limit else None
        if change is None:
            return
        for u, rank in change:
            loads[rank_of[u]] -= tokens[u]
            loads[rank] += tokens[u]
            members[rank_of[u]].remove(u)
            insort(members[rank], u, key=place.__getitem__)
            rank_of[u] = rank


def _first_exchange(
    members: Sequence[Sequence[int]], tokens: Sequence[int], loads: Sequence[int], heavy: int
) -> list[tuple[int, int]] | None:
    """The best exchange with the lightest rank where there is one; units and where they go."""
    lighter = [(load, rank) for rank, load in enumerate(loads) if load < loads[heavy]]
    heapq.heapify(lighter)
    while lighter:
        load, rank = heapq.heappop(lighter)
        exchange = _best_exchange(members, tokens, heavy, rank, loads[heavy] - load)
        if exchange:
            return exchange
    return None


def _best_exchange(
    members: Sequence[Sequence[int]], tokens: Sequence[int], heavy: int, light: int, gap: int
) -> list[tuple[int, int]]:
    """The shift or swap that brings two ranks closest; empty when nothing lowers the heavier.

    Moving `x` tokens leaves the gap `|gap - 2 x|`, so any 0 < x < gap helps. Members are by length, the
    longest first.
    """
    ours, theirs = members[heavy][:NUM_SWAP_CANDIDATES], members[light][:NUM_SWAP_CANDIDATES]
    exchanges = [(tokens[u], [(u, light)]) for u in ours]
    exchanges += [(tokens[u] - tokens[w], [(u, light), (w, heavy)]) for u in ours for w in theirs]
    useful = [(abs(gap - 2 * moved), i) for i, (moved, _) in enumerate(exchanges) if 0 < moved < gap]
    return exchanges[min(useful)[1]][1] if useful else []
