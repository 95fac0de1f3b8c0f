"""How a batch becomes minibatches, and minibatches the shards of dp ranks.

The cut comes before the split and knows nothing of ranks, so that results do not depend on
data parallelism; every epoch of a step uses the same cut.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hflow.plan.balance import Load, assign
from hflow.plan.ir import BatchCut, EdgeRule
from hflow.plan.redistribute import Holders, Place, Shards, by_place
from hflow.plan.routing import grouping


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
    blocks = grouping(len(shuffled), min(cut.minibatches, len(shuffled)) or 1)
    return tuple(tuple(sorted(shuffled[i] for i in block)) for block in blocks.values())


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
