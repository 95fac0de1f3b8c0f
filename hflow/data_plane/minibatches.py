"""`shards`: how a batch is cut into minibatches, and each minibatch is split over dp ranks.

The cut comes before the split and does not depend on the ranks, so that results do not depend on data
parallelism. All epochs of a step use the same cut.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import islice, starmap
from typing import NamedTuple

from hflow.data_plane.redistribute import FieldsByHolders, Holders, Shards, group_by_holders
from hflow.planner.plan.rows import BatchCut, EdgeRule
from hflow.shapes.layout import even_blocks

SLACK = 0.005
"""Fraction by which a rank may exceed the mean load for the sake of locality."""
NUM_EXCHANGES_PER_RANK = 4
NUM_SWAP_CANDIDATES = 64
_NO_WORKERS: frozenset[int] = frozenset()


def shards(
    rule: EdgeRule,
    cut: BatchCut | None,
    groups: Mapping[int, Sequence[int]],
    tokens: Mapping[int, int],
    holders: Holders,
    *,
    seed: int,
    step: int,
) -> Shards:
    """Split a batch over the dp ranks of a node, minibatch by minibatch.

    Args:
        rule: dp-heads, fields and policy of the node.
        cut: a train node's cut of its batch; None for other nodes, which process it as a whole.
        groups: group id -> its remaining samples.
        tokens: sample -> tokens.
        holders: the workers that have the rule's fields; samples stay where most data is, if balance permits.
        seed: the run's seed.
        step: the step that the batch belongs to.

    Returns:
        The samples of each rank. A minibatch of a rank may be empty, but all ranks have equally many.
    """
    minibatches = [tuple(sorted(groups))] if cut is None else cut_minibatches(list(groups), cut, seed, step)
    split = [_split(rule, [groups[g] for g in minibatch], tokens, holders) for minibatch in minibatches]
    return tuple(tuple(ranks[dp] for ranks in split) for dp in range(len(rule.heads)))


def minibatch_units(
    lengths: Sequence[int], group_size: int, cut: BatchCut | None, *, by_group: bool, seed: int
) -> list[list[int]]:
    """Return the tokens of each unit in each minibatch of step 0, the longest first.

    Args:
        lengths: tokens of each sample; `group_size` neighbours are a group.
        group_size: samples of a group.
        cut: a train node's cut of its batch; None for other nodes.
        by_group: whether a group stays on one rank.
        seed: the run's seed.
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
    """Return the tokens of the heaviest rank, if units may be anywhere.

    Args:
        units: tokens of what is assigned as a whole, the longest first.
        num_ranks: dp ranks.
    """
    loads = [0] * num_ranks
    for size in units:
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


def cut_minibatches(
    groups: Sequence[int], cut: BatchCut, seed: int, step: int
) -> tuple[tuple[int, ...], ...]:
    """Cut whole groups into minibatches whose sizes differ by at most one.

    Args:
        groups: group ids; their order does not matter.
        cut: the number of minibatches. None is ever empty: fewer groups make fewer minibatches.
        seed: the run's seed.
        step: only `seed` and `step` decide the shuffle.
    """
    shuffled = sorted(groups)
    random.Random(f"minibatches/{seed}/{step}").shuffle(shuffled)
    blocks = even_blocks(len(shuffled), min(cut.minibatches, len(shuffled)) or 1)
    return tuple(tuple(sorted(shuffled[i] for i in block)) for block in blocks)


class AssignmentUnit(NamedTuple):
    """A unit that is assigned to a rank as a whole: a sample, or a group that must stay together."""

    id: int
    tokens: int


def assign_units(
    units: Sequence[AssignmentUnit], num_ranks: int, holders: Sequence[Set[int]]
) -> tuple[tuple[int, ...], ...]:
    """Assign units to ranks, moving as few tokens as balance permits. Deterministic.

    The limit of a rank is the heaviest load of the longest-first schedule (LPT: Graham, 1969), or the mean
    plus `SLACK` if that is more. No rank ends above the limit. Units stay with a holder up to the limit, the
    longest first, so that the units that must move are short and fill gaps well.

    Args:
        units: units with distinct ids.
        num_ranks: number of ranks.
        holders: the ranks that hold the data of each unit.

    Returns:
        For each rank the ids of its units, ascending.
    """
    tokens = [unit.tokens for unit in units]
    keys = [(-unit.tokens, unit.id) for unit in units]
    order = sorted(range(len(units)), key=keys.__getitem__)
    limit = _load_limit([tokens[u] for u in order], num_ranks)
    rank_of, loads = _assign_to_holders(order, tokens, holders, num_ranks, limit)
    _assign_to_lightest([u for u in order if u not in rank_of], tokens, loads, rank_of)
    _exchange(order, tokens, loads, rank_of, limit)
    if max(loads) > limit:
        rank_of = {}
        _assign_to_lightest(order, tokens, [0] * num_ranks, rank_of)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for u, rank in rank_of.items():
        ranks[rank].append(units[u].id)
    return tuple(tuple(sorted(ids)) for ids in ranks)


def _split(
    rule: EdgeRule, groups: Sequence[Sequence[int]], tokens: Mapping[int, int], holders: Holders
) -> tuple[tuple[int, ...], ...]:
    """Split one minibatch by groups or by samples. The id of a unit is its first sample."""
    if rule.policy == "single":
        return (tuple(sorted(sample for group in groups for sample in group)),)
    samples = {sample: tokens[sample] for group in groups for sample in group}
    members = (
        {min(group): group for group in groups if group} if rule.by_group else {s: (s,) for s in samples}
    )
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for dp, dp_head in enumerate(rule.heads):
        ranks_of[dp_head].append(dp)
    best = _best_ranks(ranks_of, members.values(), tokens, group_by_holders(rule.fields, holders))
    if not rule.by_group:
        return assign_units(list(starmap(AssignmentUnit, samples.items())), len(rule.heads), best)
    loads = [AssignmentUnit(first, sum(tokens[s] for s in group)) for first, group in members.items()]
    return tuple(
        tuple(sorted(sample for first in ids for sample in members[first]))
        for ids in assign_units(loads, len(rule.heads), best)
    )


def _best_ranks(
    ranks_of: Mapping[int, Sequence[int]],
    units: Iterable[Sequence[int]],
    tokens: Mapping[int, int],
    field_groups: Sequence[FieldsByHolders],
) -> list[frozenset[int]]:
    """Return, for each unit, the ranks whose workers hold most of it, in tokens times fields."""
    heads = frozenset(ranks_of)
    maps = [(workers, len(fields)) for workers, fields in field_groups]
    known: dict[frozenset[int], frozenset[int]] = {}
    best = []
    for unit in units:
        weight: dict[int, int] = {}
        for sample in unit:
            size = tokens[sample]
            for workers, num_fields in maps:
                near = heads & workers.get(sample, _NO_WORKERS)
                for worker in near:
                    weight[worker] = weight.get(worker, 0) + size * num_fields
        if len(weight) > 1:
            max_weight = max(weight.values())
            near = frozenset([worker for worker, w in weight.items() if w == max_weight])
        else:
            near = frozenset(weight)
        if near not in known:
            known[near] = frozenset(dp for worker in near for dp in ranks_of[worker])
        best.append(known[near])
    return best


def _load_limit(descending: Sequence[int], num_ranks: int) -> float:
    loads = [0] * num_ranks
    for size in descending:
        heapq.heapreplace(loads, loads[0] + size)
    return max(max(loads), (1 + SLACK) * sum(descending) / num_ranks)


def _assign_to_holders(
    order: Sequence[int], tokens: Sequence[int], holders: Sequence[Set[int]], num_ranks: int, limit: float
) -> tuple[dict[int, int], list[int]]:
    """Assign units to their least loaded holder up to the limit; units with several holders come last."""
    loads = [0] * num_ranks
    rank_of: dict[int, int] = {}
    with_one = [u for u in order if len(holders[u]) == 1]
    with_several = [u for u in order if len(holders[u]) > 1]
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
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for u in units:
        load, rank = heap[0]
        rank_of[u] = rank
        loads[rank] = load + tokens[u]
        heapq.heapreplace(heap, (loads[rank], rank))


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
        members: units of each rank, the longest first.
        tokens: tokens of each unit.
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
