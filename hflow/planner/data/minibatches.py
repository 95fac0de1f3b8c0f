"""How a batch becomes minibatches, and minibatches the shards of dp ranks.

The cut comes before the split and knows nothing of ranks, so that results do not depend on
data parallelism; every epoch of a step uses the same cut.
"""

from __future__ import annotations

import heapq
import random
from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from hflow.planner.data.redistribute import Holders, Place, Shards, by_place
from hflow.planner.ir import BatchCut, EdgeRule
from hflow.planner.layout import even_blocks

# -------------------- `assign`: which dp rank gets which samples. Locality first, as far as balance
# permits.


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


def cut_minibatches(
    groups: Sequence[int], cut: BatchCut, seed: int, step: int
) -> tuple[tuple[int, ...], ...]:
    """Cut whole groups into minibatches whose sizes differ by at most one.

    Args:
        groups: group ids; their order does not matter.
        cut: how many minibatches; none is ever empty, so fewer groups make fewer of them.
        seed: the run's seed.
        step: together with the seed it decides the shuffle, and nothing else does.
    """
    shuffled = sorted(groups)
    random.Random(f"minibatches/{seed}/{step}").shuffle(shuffled)
    blocks = even_blocks(len(shuffled), min(cut.minibatches, len(shuffled)) or 1)
    return tuple(tuple(sorted(shuffled[i] for i in block)) for block in blocks)


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
        rule: heads, fields and policy of the node.
        cut: how a train node cuts its batch; None for other nodes, which see it whole.
        groups: group id -> its samples that are left.
        tokens: sample -> tokens.
        holders: where the rule's fields lie; units stay where most of their tokens are.
        seed: the run's seed.
        step: the step that the batch is bound to.

    Returns:
        The samples of each rank; a rank's minibatch may be empty, but all have as many.
    """
    minibatches = [tuple(sorted(groups))] if cut is None else cut_minibatches(list(groups), cut, seed, step)
    split = [_split(rule, [groups[g] for g in minibatch], tokens, holders) for minibatch in minibatches]
    return tuple(tuple(ranks[dp] for ranks in split) for dp in range(len(rule.heads)))


def _split(
    rule: EdgeRule, groups: Sequence[Sequence[int]], tokens: Mapping[int, int], holders: Holders
) -> tuple[tuple[int, ...], ...]:
    """Split one minibatch, by groups or by samples; a unit is named by its first sample."""
    if rule.policy == "single":
        return (tuple(sorted(sample for group in groups for sample in group)),)
    units = groups if rule.by_group else [(sample,) for group in groups for sample in group]
    members = {unit[0] if len(unit) == 1 else min(unit): unit for unit in units if unit}
    loads = [Load(name, sum(tokens[s] for s in unit)) for name, unit in members.items()]
    places = by_place(rule.fields, holders)
    ranks_of: dict[int, list[int]] = defaultdict(list)
    for dp, head in enumerate(rule.heads):
        ranks_of[head].append(dp)
    at = _best_of_units(ranks_of, members.values(), tokens, places)
    return tuple(
        tuple(sorted(sample for name in names for sample in members[name]))
        for names in assign(loads, len(rule.heads), at)
    )


def _best_of_units(
    ranks_of: Mapping[int, Sequence[int]],
    units: Iterable[Sequence[int]],
    tokens: Mapping[int, int],
    places: Sequence[Place],
) -> list[frozenset[int]]:
    """`_best_ranks` of each unit; of single samples with the same holders, of which there are many, once."""
    known: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
    found = []
    for unit in units:
        if len(unit) > 1:
            found.append(_best_ranks(ranks_of, unit, tokens, places))
            continue
        holders = tuple([at.get(unit[0], frozenset()) for at, _ in places])
        if holders not in known:
            known[holders] = _best_ranks(ranks_of, unit, tokens, places)
        found.append(known[holders])
    return found


def _best_ranks(
    ranks_of: Mapping[int, Sequence[int]],
    unit: Iterable[int],
    tokens: Mapping[int, int],
    places: Iterable[Place],
) -> frozenset[int]:
    """The ranks whose workers hold most of a unit, in tokens times fields."""
    weight: dict[int, int] = defaultdict(int)
    for sample in unit:
        for at, fields in places:
            for worker in at.get(sample, ()):
                if worker in ranks_of:
                    weight[worker] += tokens[sample] * len(fields)
    most = max(weight.values(), default=0)
    best = [worker for worker, held in weight.items() if most and held == most]
    return frozenset(dp for worker in best for dp in ranks_of[worker])
