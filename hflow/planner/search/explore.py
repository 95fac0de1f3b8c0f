"""`explore`: the best choice for each way of dividing the replicas into groups.

Every division is tried. For each one, sizes of groups are tried on a grid: all of them on small clusters,
powers of two and multiples of machines on large ones. Options of a group come from its table. A candidate
whose lower bound is not below the best of its division is dropped before its period is computed. Then the
best of each division is improved: devices move between groups in ever smaller steps, and each replica tries
its other options. Last come divisions in which replicas use the devices of several groups. These are of use
only if they are clearly faster than all others.

The order of everything is fixed, and the budget counts candidates, not seconds, so a search finds the same on
every machine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hflow.planner.make.replicas import Devices
from hflow.planner.search.evaluate import Choice, Evaluator, GroupChoice
from hflow.planner.search.layouts import (
    Share,
    devices_of_parts,
    devices_of_shares,
    divisions_of,
    group_sizes,
)
from hflow.planner.search.partition import Blocks, overlaps, set_partitions, spread_sets
from hflow.planner.search.problem import SearchProblem

BUDGET = 200_000
"""Candidates of one search. PPO with five models on 1,024 devices needs about a tenth of it."""
NUM_IMPROVED = 6
"""Divisions whose best choice is improved."""
MAX_REPLACED = 24
"""Options of a replica that are tried in the place of its best one."""
MIN_GAIN = 1e-6
"""Relative improvement that counts."""
NUM_KEPT = 8
"""Alternatives of a division that are kept."""
MIN_SPREAD_GAIN = 0.01
"""By so much a step must be shorter with replicas in several groups: such plans are more complex."""
MAX_SLOWER = 0.5
"""Alternatives are at most this much slower than the best of their division, by the analytic period. Nor are
divisions improved that are slower by more than the best of all, or than what is of use."""
MAX_LONGER = 2.0
"""Divisions that take so many times as long as the best one so far are left out."""


@dataclass
class Exploration:
    """The choices that a search has found.

    Attributes:
        evaluator: tables of seconds and memory.
        keeps_alternatives: whether choices are kept that are not the best of their division.
        best: division -> its best choice.
        alternatives: division -> the fastest choices with different sizes of groups, layouts of engines or
            sequences at once, the best one included; empty unless they are kept.
        longest: seconds of a step from which on a choice is of no use, once it is improved.
        num_tried: candidates so far.
        budget: most candidates to try.
        most_reasons: most reasons of a run to refuse a division; None: divisions are not checked again.
    """

    evaluator: Evaluator
    budget: int = BUDGET
    keeps_alternatives: bool = False
    best: dict[Blocks, Choice] = field(default_factory=dict)
    alternatives: dict[Blocks, list[Choice]] = field(default_factory=dict)
    longest: float = math.inf
    num_tried: int = 0
    most_reasons: int | None = None

    @property
    def is_spent(self) -> bool:
        """Whether as many candidates were tried as the budget allows."""
        return self.num_tried >= self.budget

    def ranked(self) -> list[Choice]:
        """Return the best choice of each division, the fastest first."""
        return sorted(self.best.values(), key=lambda choice: (choice.period, len(choice.groups)))

    def add(self, choice: Choice) -> bool:
        """Keep a choice if it is of use, and return whether it is the best of its division."""
        blocks = choice.partition.blocks
        best = self.best.get(blocks)
        is_best = best is None or choice.period < best.period * (1 - MIN_GAIN)
        if is_best:
            self.best[blocks] = choice
        if self.keeps_alternatives:
            rows = self.alternatives.setdefault(blocks, [])
            same = next((row for row in rows if _kind(row) == _kind(choice)), None)
            if same is None or choice.period < same.period:
                rows[:] = [row for row in rows if row is not same]
                rows.append(choice)
                rows.sort(key=lambda row: row.period)
                del rows[NUM_KEPT:]
        return is_best

    def cutoff(self, blocks: Blocks) -> float:
        """Return the period from which on a choice of a division is of no use."""
        best = self.best.get(blocks)
        if best is None:
            factor = 1 - MIN_SPREAD_GAIN if overlaps(blocks) else MAX_LONGER
            return min(self.shortest_apart() * factor, self.longest * (1 + MAX_SLOWER))
        better = best.period * (1 - MIN_GAIN)
        if not self.keeps_alternatives:
            return better
        rows, slowest = self.alternatives[blocks], min(best.period * (1 + MAX_SLOWER), self.longest)
        return max(better, min(slowest, rows[-1].period) if len(rows) == NUM_KEPT else slowest)

    def can_run(self, blocks: Blocks) -> bool:
        """Return whether a run can execute a division for all that is known of it."""
        if self.most_reasons is None or blocks in self.best:
            return True
        num = self.evaluator.num_unrunnable(blocks)
        return num is not None and num <= self.most_reasons

    def shortest_apart(self) -> float:
        """Return the shortest period without replicas in several groups."""
        apart = (choice.period for blocks, choice in self.best.items() if not overlaps(blocks))
        return min(apart, default=math.inf)


def _kind(choice: Choice) -> Hashable:
    """Return the key that identifies an alternative of a division."""
    engines = [option for option in choice.options if option.replica.role == "gen"]
    places = tuple((devices[0], len(devices)) for devices in choice.devices)
    return places, tuple((option.layout, option.config.gen.max_running) for option in engines)


def explore(
    evaluator: Evaluator,
    budget: int = BUDGET,
    *,
    keeps_alternatives: bool = False,
    longest: float = math.inf,
) -> Exploration:
    """Return the best choices for a problem with a step below `longest`; none if nothing fits."""
    found = Exploration(evaluator, budget, keeps_alternatives, longest=longest)
    if too_large(evaluator):
        return found
    plain = divisions(evaluator)
    for blocks in plain:
        _try_sizes(found, blocks)
    slowest = min(found.shortest_apart(), longest) * (1 + MAX_SLOWER)
    for choice in found.ranked()[:NUM_IMPROVED]:
        if choice.period < slowest:
            _improve(found, choice)
    found.most_reasons = evaluator.num_unrunnable(plain[0]) if plain else None
    spread = list(spread_divisions(evaluator))
    for blocks in spread:
        _try_sizes(found, blocks)
    for choice in found.ranked()[:NUM_IMPROVED]:
        if choice.partition.blocks in spread:
            _improve(found, choice)
    found.best = {blocks: choice for blocks, choice in found.best.items() if choice.period < longest}
    return found


def too_large(evaluator: Evaluator) -> str | None:
    """Return a replica that does not fit on any number of devices, even alone; None if each one does."""
    problem = evaluator.problem
    if problem.fixed or not problem.free_devices:
        return None
    sets = [
        free[:size]
        for free in devices_of_parts(problem.free_devices, problem.cluster).values()
        for size in group_sizes(len(free), problem.cluster)[::-1]
    ]
    return next((n for n in problem.loose if not any(evaluator.fits_alone(n, own) for own in sets)), None)


def divisions(evaluator: Evaluator) -> list[Blocks]:
    """Return the ways of dividing replicas into groups that a run can execute, the coarsest first.

    Replicas join groups that the user has named, or form groups on the devices that are left. A division is
    left out if it makes the plan impossible to run for a reason that others avoid. A replica is in several
    groups only if the user has placed it there.
    """
    problem = evaluator.problem
    reasons = {}
    for blocks in _divided(problem, problem.loose):
        if (num := evaluator.num_unrunnable(blocks)) is not None:
            reasons[blocks] = num
    fewest = min(reasons.values(), default=0)
    return [blocks for blocks, num in reasons.items() if num == fewest]


def spread_divisions(evaluator: Evaluator) -> Iterator[Blocks]:
    """Yield divisions in which some replicas use the devices of all groups, beside those of `divisions`."""
    problem = evaluator.problem
    for spread in spread_sets(problem.loose):
        others = [name for name in problem.loose if name not in spread]
        for blocks in _divided(problem, others):
            if len(blocks) > 1:
                yield _in_order(problem, [(*block, *spread) for block in blocks])


def _divided(problem: SearchProblem, loose: Sequence[str]) -> Iterator[Blocks]:
    """Yield the ways of dividing replicas without devices, and the groups that the user has named."""
    anchors = [group.replicas for group in problem.fixed]
    elements: list[tuple[str, ...]] = [*anchors, *((name,) for name in loose)]
    for partition in set_partitions([str(i) for i in range(len(elements))]):
        if any(sum(int(i) < len(anchors) for i in block) > 1 for block in partition):
            continue
        placed = {i for i, group in enumerate(problem.fixed) if group.devices is not None}
        num_new = sum(placed.isdisjoint(map(int, block)) for block in partition)
        if num_new <= len(problem.free_devices):
            yield _in_order(
                problem, [[name for i in block for name in elements[int(i)]] for block in partition]
            )


def _in_order(problem: SearchProblem, blocks: Iterable[Iterable[str]]) -> Blocks:
    """Return groups with replicas in the order of the plan."""
    position = {r.name: i for i, r in enumerate(problem.base.replicas)}
    rows = sorted(sorted(position[name] for name in block) for block in blocks)
    return tuple(tuple(problem.base.replicas[i].name for i in row) for row in rows)


def _try_sizes(found: Exploration, blocks: Blocks) -> None:
    """Try all sizes of the groups of a division."""
    evaluator = found.evaluator
    problem = evaluator.problem
    num_new = sum(evaluator.fixed_devices(block) is None for block in blocks)
    for shares in divisions_of(problem.free_devices, problem.cluster, num_new):
        if found.is_spent:
            return
        _try_division(found, blocks, shares)


def _try_division(found: Exploration, blocks: Blocks, shares: Sequence[Share]) -> Choice | None:
    """Try the best options of each group with some devices.

    Returns:
        The choice if it is the best of its division, else None.
    """
    devices = None if found.is_spent else _devices(found.evaluator, blocks, shares)
    if devices is None:
        return None
    groups = found.evaluator.best_groups(blocks, devices, found.cutoff(blocks))
    if groups is not None and not found.can_run(blocks):
        return None
    return _try(found, blocks, devices, groups)


def _devices(evaluator: Evaluator, blocks: Blocks, shares: Sequence[Share]) -> tuple[Devices, ...] | None:
    """Return the devices of each group: those that the user named, or free ones.

    None if they cannot be placed like this, or a replica would have devices of several kinds.
    """
    fixed = [evaluator.fixed_devices(block) for block in blocks]
    problem = evaluator.problem
    new = devices_of_shares(shares, problem.free_devices, problem.cluster)
    if new is None:
        return None
    rest = iter(new)
    found = tuple(next(rest) if devices is None else devices for devices in fixed)
    for name in {name for block in blocks for name in block} if problem.cluster.parts else ():
        own = (devices for devices, block in zip(found, blocks, strict=True) if name in block)
        if len({problem.cluster.part_index(devices[0]) for devices in own}) > 1:
            return None
    return found


def _try(
    found: Exploration, blocks: Blocks, devices: tuple[Devices, ...], groups: Sequence[GroupChoice] | None
) -> Choice | None:
    found.num_tried += 1
    if groups is None:
        return None
    choice = found.evaluator.choice(blocks, devices, groups, found.cutoff(blocks))
    return choice if choice is not None and found.add(choice) else None


def _improve(found: Exploration, choice: Choice) -> None:
    """Change one thing at a time until nothing makes the step shorter."""
    while not found.is_spent:
        better = _moved(found, choice) or _replaced(found, choice)
        if better is None:
            return
        choice = better


def _moved(found: Exploration, choice: Choice) -> Choice | None:
    """Return a better choice with devices moved from one group to another."""
    evaluator, blocks = found.evaluator, choice.partition.blocks
    new = [i for i, block in enumerate(blocks) if evaluator.fixed_devices(block) is None]
    cluster = evaluator.problem.cluster
    shares = [Share(cluster.part_index(choice.devices[i][0]), len(choice.devices[i])) for i in new]
    for step in _steps(evaluator):
        for giver, giving in enumerate(shares):
            for taker, taking in enumerate(shares):
                if giver != taker and giving.part == taking.part and giving.num > step:
                    changed = list(shares)
                    changed[giver] = replace(giving, num=giving.num - step)
                    changed[taker] = replace(taking, num=taking.num + step)
                    better = _try_division(found, blocks, changed)
                    if better is not None:
                        return better
    return None


def _steps(evaluator: Evaluator) -> Iterator[int]:
    """Yield numbers of devices to move: a grid unit, half of it and so on, down to a machine or a device."""
    num, cluster = len(evaluator.problem.free_devices), evaluator.problem.cluster
    sizes = group_sizes(num, cluster) if num else (1,)
    step = max((b - a for a, b in pairwise(sizes)), default=1)
    smallest = max(cluster.devices_per_node, step // 4) if num > 8 * cluster.devices_per_node else 1
    while step >= smallest:
        yield step
        step //= 2


def _replaced(found: Exploration, choice: Choice) -> Choice | None:
    """Return a better choice in which one replica has another option."""
    evaluator, blocks = found.evaluator, choice.partition.blocks
    for before in choice.options:
        for option in evaluator.options(before.name, blocks, choice.devices)[:MAX_REPLACED]:
            if found.is_spent:
                return None
            if option is before:
                continue
            groups = evaluator.replaced(choice, option)
            if groups is None:
                continue
            better = _try(found, blocks, choice.devices, groups)
            if better is not None:
                return better
    return None
