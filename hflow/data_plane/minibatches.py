"""`shards`: how a batch is cut into minibatches, and each minibatch is split over dp ranks.

The cut comes before the split and does not depend on the ranks, so that results do not depend on data
parallelism. All epochs of a step use the same cut.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice, pairwise

import numpy as np

from hflow.data_plane.redistribute import Holders, Integers, Shards
from hflow.planner.plan.rows import BatchCut, EdgeRule
from hflow.shapes.layout import even_blocks

SLACK = 0.005
"""Fraction by which a rank may exceed the mean load for the sake of locality."""
NUM_EXCHANGES_PER_RANK = 4
NUM_SWAP_CANDIDATES = 64


def shards(
    rule: EdgeRule,
    cut: BatchCut | None,
    groups: Mapping[int, Sequence[int]],
    holders: Holders,
    *,
    seed: int,
    step: int,
) -> Shards:
    """Split a batch over the dp ranks of a node, minibatch by minibatch.

    Args:
        cut: a train node's cut of its batch; None for other nodes, which process it as a whole.
        holders: the samples' tokens, and the workers that have the rule's fields; samples stay where most
            data is, if balance permits.

    Returns:
        The samples of each rank. A minibatch of a rank may be empty, but all ranks have equally many.
    """
    minibatches = [tuple(sorted(groups))] if cut is None else cut_minibatches(list(groups), cut, seed, step)
    split = [_split(rule, [groups[g] for g in minibatch], holders) for minibatch in minibatches]
    return tuple(tuple(ranks[dp] for ranks in split) for dp in range(len(rule.heads)))


def minibatch_units(
    lengths: Sequence[int], group_size: int, cut: BatchCut | None, *, by_group: bool, seed: int
) -> list[list[int]]:
    """Return the tokens of each unit in each minibatch of step 0, the longest first.

    Args:
        lengths: tokens of each sample; `group_size` neighbours are a group.
        cut: a train node's cut of its batch; None for other nodes.
        by_group: whether a group stays on one rank.
    """
    groups = [lengths[i : i + group_size] for i in range(0, len(lengths), group_size)]
    ids = range(len(groups))
    units = []
    for minibatch in [tuple(ids)] if cut is None else cut_minibatches(ids, cut, seed, 0):
        tokens = (
            [sum(groups[g]) for g in minibatch] if by_group else [n for g in minibatch for n in groups[g]]
        )
        units.append(sorted(tokens, reverse=True))
    return units


def heaviest_load(units: Sequence[int], num_ranks: int) -> int:
    """Return the tokens of the heaviest dp rank, if units, the longest first, may be anywhere."""
    loads = [0] * num_ranks
    for size in units:
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


def cut_minibatches(
    groups: Sequence[int], cut: BatchCut, seed: int, step: int
) -> tuple[tuple[int, ...], ...]:
    """Cut whole groups, in any order, into minibatches whose sizes differ by at most one.

    None is ever empty: fewer groups make fewer minibatches. Only `seed` and `step` decide the shuffle.
    """
    shuffled = sorted(groups)
    random.Random(f"minibatches/{seed}/{step}").shuffle(shuffled)
    blocks = even_blocks(len(shuffled), min(cut.minibatches, len(shuffled)) or 1)
    return tuple(tuple(sorted(shuffled[i] for i in block)) for block in blocks)


def assign_units(tokens: Sequence[int], num_ranks: int, holders: Mapping[int, Sequence[int]]) -> list[int]:
    """Assign units to ranks, moving as few tokens as balance permits. Deterministic.

    A unit is what is assigned as a whole: a sample, or a group that must stay together. The limit of a rank
    is the heaviest load of the longest-first schedule (LPT: Graham, 1969), or the mean plus `SLACK` if that
    is more. No rank ends above the limit. Units stay with a holder up to the limit, the longest first, so
    that the units that must move are short and fill gaps well. `holders` has the ranks that hold the data of
    a unit, if any does.
    """
    order, ranks, heaviest = _longest_first(tuple(tokens), num_ranks)
    limit = max(heaviest, (1 + SLACK) * sum(tokens) / num_ranks)
    if holders:
        near, loads = _assign_to_holders(order, tokens, holders, num_ranks, limit)
        _assign_to_lightest([u for u in order if u not in near], tokens, loads, near)
        _exchange(order, tokens, loads, near, limit)
        if max(loads) <= limit:
            return [near[u] for u in range(len(tokens))]
    return list(ranks)


@lru_cache(maxsize=8)
def _longest_first(tokens: tuple[int, ...], num_ranks: int) -> tuple[list[int], list[int], int]:
    """Return the units, the longest first, the rank of each if they may be anywhere, and the heaviest load.

    Kept, as several nodes of a step have equally many ranks.
    """
    order = sorted(range(len(tokens)), key=tokens.__getitem__, reverse=True)
    rank_of: dict[int, int] = {}
    loads = [0] * num_ranks
    _assign_to_lightest(order, tokens, loads, rank_of)
    return order, [rank_of[u] for u in range(len(tokens))], max(loads)


def _split(rule: EdgeRule, groups: Sequence[Sequence[int]], holders: Holders) -> tuple[tuple[int, ...], ...]:
    """Split one minibatch by groups, in ascending order, or by samples."""
    if rule.policy == "single":
        return (tuple(sorted(sample for group in groups for sample in group)),)
    samples = np.fromiter(chain.from_iterable(groups), np.int64)
    if rule.by_group:
        sizes = [len(group) for group in groups if group]
        units = np.repeat(np.arange(len(sizes)), sizes)
    else:
        samples.sort()
        units = np.arange(len(samples))
    rows = holders.rows(samples)
    tokens = np.bincount(units, holders.tokens[rows]).astype(np.int64).tolist()
    ranks = np.array(assign_units(tokens, len(rule.heads), _best_ranks(rule, units, rows, holders)), np.int64)
    rank_of = ranks[units]
    ordered = samples[np.lexsort((samples, rank_of))].tolist()
    ends = np.bincount(rank_of, minlength=len(rule.heads)).cumsum().tolist()
    return tuple(tuple(ordered[start:end]) for start, end in pairwise((0, *ends)))


def _best_ranks(rule: EdgeRule, units: Integers, rows: Integers, holders: Holders) -> dict[int, list[int]]:
    """Return, for each unit, the ranks whose workers hold most of it, in tokens times fields."""
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for dp, dp_head in enumerate(rule.heads):
        ranks_of[dp_head].append(dp)
    heads, pairs, weights = sorted(ranks_of), [], []
    for group in holders.groups:
        workers = group.workers[:, rows]
        place, row = np.nonzero(np.isin(workers, heads))
        pairs.append(units[row] * len(heads) + np.searchsorted(heads, workers[place, row]))
        weights.append(holders.tokens[rows[row]] * len(group.fields))
    keys, place = np.unique(np.concatenate(pairs or [units[:0]]), return_inverse=True)
    if not len(keys):
        return {}
    weight = np.bincount(place, np.concatenate(weights))
    unit, head = keys // len(heads), keys % len(heads)
    starts = np.flatnonzero(np.diff(unit, prepend=-1))
    most = np.repeat(np.maximum.reduceat(weight, starts), np.diff(starts, append=len(unit)))
    best: dict[int, list[int]] = defaultdict(list)
    for number, place in zip(unit[weight == most].tolist(), head[weight == most].tolist(), strict=True):
        best[number] += ranks_of[heads[place]]
    return best


def _assign_to_holders(
    order: Sequence[int],
    tokens: Sequence[int],
    holders: Mapping[int, Sequence[int]],
    num_ranks: int,
    limit: float,
) -> tuple[dict[int, int], list[int]]:
    """Assign units to their least loaded holder up to the limit; units with several holders come last."""
    loads = [0] * num_ranks
    rank_of: dict[int, int] = {}
    with_one = [u for u in order if u in holders and len(holders[u]) == 1]
    with_several = [u for u in order if u in holders and len(holders[u]) > 1]
    for u in (*with_one, *with_several):
        load, rank = min((loads[rank], rank) for rank in holders[u])
        if load + tokens[u] <= limit:
            rank_of[u] = rank
            loads[rank] += tokens[u]
    return rank_of, loads


def _assign_to_lightest(
    units: Sequence[int], tokens: Sequence[int], loads: list[int], rank_of: dict[int, int]
) -> None:
    """Assign each unit, in this order, to the rank with the smallest load."""
    num_ranks = len(loads)
    heap = [load * num_ranks + rank for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for u in units:
        lightest = heap[0]
        rank_of[u] = lightest % num_ranks
        heapq.heapreplace(heap, lightest + tokens[u] * num_ranks)
    for lightest in heap:
        loads[lightest % num_ranks] = lightest // num_ranks


def _exchange(
    order: Sequence[int], tokens: Sequence[int], loads: list[int], rank_of: dict[int, int], limit: float
) -> None:
    """Shift or swap units away from the heaviest rank until the limit holds or no exchange helps.

    This is needed if units are few and long, so that the units that had to move do not fit into any gap.
    """
    if max(loads) <= limit:
        return
    position = {u: i for i, u in enumerate(order)}
    members: list[list[int]] = [[] for _ in loads]
    for u in order:
        members[rank_of[u]].append(u)
    by_load = sorted((load, rank) for rank, load in enumerate(loads))
    for _ in range(NUM_EXCHANGES_PER_RANK * len(loads)):
        max_load = by_load[-1][0]
        first_heaviest = bisect_left(by_load, (max_load, 0))
        heavy = by_load[first_heaviest][1]
        lighter = islice(by_load, first_heaviest)
        exchange = _first_exchange(members, tokens, lighter, heavy, max_load) if max_load > limit else None
        if exchange is None:
            return
        for u, rank in exchange:
            for changed, size in ((rank_of[u], -tokens[u]), (rank, tokens[u])):
                del by_load[bisect_left(by_load, (loads[changed], changed))]
                loads[changed] += size
                insort(by_load, (loads[changed], changed))
            members[rank_of[u]].remove(u)
            insort(members[rank], u, key=position.__getitem__)
            rank_of[u] = rank


def _first_exchange(
    members: Sequence[Sequence[int]],
    tokens: Sequence[int],
    lighter: Iterable[tuple[int, int]],
    heavy: int,
    max_load: int,
) -> list[tuple[int, int]] | None:
    """Return the best exchange with the lightest rank that has one, as units with their new ranks.

    Args:
        lighter: (load, rank) of ranks other than the heaviest ones, the lightest first.
        heavy: a heaviest rank.
        max_load: the heavy rank's load.
    """
    for load, rank in lighter:
        exchange = _best_exchange(members, tokens, heavy, rank, max_load - load)
        if exchange:
            return exchange
    return None


def _best_exchange(
    members: Sequence[Sequence[int]], tokens: Sequence[int], heavy: int, light: int, gap: int
) -> list[tuple[int, int]]:
    """Return the shift or swap that brings two ranks closest; empty if none lowers the heavier rank.

    Moving `x` tokens changes the gap to `|gap - 2 x|`, so any 0 < x < gap helps. Only the longest members of
    both ranks are tried.
    """
    ours, theirs = members[heavy][:NUM_SWAP_CANDIDATES], members[light][:NUM_SWAP_CANDIDATES]
    exchanges = [(tokens[u], [(u, light)]) for u in ours]
    exchanges += [(tokens[u] - tokens[w], [(u, light), (w, heavy)]) for u in ours for w in theirs]
    useful = [(abs(gap - 2 * moved), i) for i, (moved, _) in enumerate(exchanges) if 0 < moved < gap]
    return exchanges[min(useful)[1]][1] if useful else []
