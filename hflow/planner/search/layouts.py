"""How groups of replicas divide devices, and the layouts with which a replica can use its devices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise, product

from hflow.planner.checks.unrunnable import layout_reasons
from hflow.planner.make.replicas import Devices
from hflow.planner.models.choices import served_model
from hflow.planner.models.descriptors import engine_kind
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.search.problem import SearchProblem
from hflow.planner.weights.sharding import can_split
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape, kinds_of_layers, other_tensors

EVERY_SIZE = 16
"""Up to this many devices, groups of every size are tried."""
NUM_UNITS = 16
"""Larger clusters are divided in about this many equal parts; the search then moves parts of them."""
HUGE_CLUSTER = 4096
"""Clusters of more devices are divided in half as many parts."""


def group_sizes(num_devices: int, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the sizes of groups to try first on a number of free devices, ascending.

    On large clusters these are powers of two within a machine, and multiples of a number of machines, with
    and without the devices that are left over.
    """
    if num_devices <= EVERY_SIZE:
        return tuple(range(1, num_devices + 1))
    per_machine = cluster.devices_per_node
    unit, num_units = per_machine, NUM_UNITS if num_devices <= HUGE_CLUSTER else NUM_UNITS // 2
    while num_devices > num_units * unit:
        unit *= 2
    small = {1 << i for i in range(unit.bit_length()) if 1 << i < unit and unit % (1 << i) == 0}
    if num_devices > 8 * EVERY_SIZE:  # a part of a machine is of no use beside so many
        small = {size for size in small if size % per_machine == 0}
    left_over = range(num_devices % unit, num_devices + 1, unit)
    return tuple(sorted({*small, *range(unit, num_devices + 1, unit), *left_over} - {0}))


@lru_cache(maxsize=1024)
def compositions(total: int, num_groups: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return every way to write a number as an ordered sum of sizes."""
    if num_groups == 0:
        return ((),) if total == 0 else ()
    if num_groups == 1:
        return ((total,),) if total in sizes else ()
    found = []
    for size in sizes:
        if size >= total:
            break
        found += [(size, *rest) for rest in compositions(total - size, num_groups - 1, sizes)]
    return tuple(found)


@dataclass(frozen=True)
class Share:
    """The devices of a group, as a number of the free ones of their kind."""

    part: int
    """Index in `ClusterSpec.parts`; 0 if all machines are equal."""
    num: int


def divisions_of(devices: Devices, cluster: ClusterSpec, num_groups: int) -> Iterator[tuple[Share, ...]]:
    """Yield the share of each group, for all ways of dividing free devices that are tried first.

    All groups of a kind of devices together have all of them. Kinds may be without a group.
    """
    free = devices_of_parts(devices, cluster)
    for parts in product(free, repeat=num_groups):
        used = tuple(dict.fromkeys(parts))
        ways = [tuple(_sizes_of(free[part], cluster, parts.count(part))) for part in used]
        for chosen in product(*ways):
            sizes = {part: iter(row) for part, row in zip(used, chosen, strict=True)}
            yield tuple(Share(part, next(sizes[part])) for part in parts)


def _sizes_of(free: Devices, cluster: ClusterSpec, num_groups: int) -> Iterator[tuple[int, ...]]:
    """Yield the sizes of groups that divide free devices of one kind."""
    for usable in usable_devices(free, cluster):
        yield from compositions(len(usable), num_groups, group_sizes(len(usable), cluster))


def devices_of_shares(
    shares: Sequence[Share], devices: Devices, cluster: ClusterSpec
) -> tuple[Devices, ...] | None:
    """Return the devices of groups that divide free devices, or None if they cannot be placed."""
    found: dict[int, Devices] = {}
    for part, free in devices_of_parts(devices, cluster).items():
        own = [i for i, share in enumerate(shares) if share.part == part]
        sizes = tuple(shares[i].num for i in own)
        usable = (some for some in usable_devices(free, cluster) if len(some) == sum(sizes))
        placed = assign_devices(sizes, next(usable, ()), cluster)
        if placed is None:
            return None
        found |= zip(own, placed, strict=True)
    return tuple(found[i] for i in range(len(shares)))


@lru_cache(maxsize=8)
def devices_of_parts(devices: Devices, cluster: ClusterSpec) -> Mapping[int, Devices]:
    """Return devices by the index of their kind, for kinds that have any."""
    found: dict[int, list[int]] = {}
    for device in devices:
        found.setdefault(cluster.part_index(device), []).append(device)
    return {part: tuple(own) for part, own in found.items()}


@lru_cache(maxsize=8)
def usable_devices(devices: Devices, cluster: ClusterSpec) -> tuple[Devices, ...]:
    """Return the sets of free devices that groups may divide: all, then those without odd rests of machines.

    Where other groups have a part of a machine, tensor groups may not fit into the rest. So the rest is also
    rounded down to a multiple of 2, 4 and so on; the other devices are idle. Whole machines are always used.
    No two sets have equal sizes.
    """
    found: dict[int, Devices] = {}
    multiple = 1
    while multiple < 2 * cluster.devices_per_node:
        kept: list[int] = []
        for rest in _by_machine(devices, cluster):
            is_whole = len(rest) == cluster.devices_per_node
            kept += rest if is_whole else rest[len(rest) % multiple :]
        if kept:
            found.setdefault(len(kept), tuple(kept))
        multiple *= 2
    return tuple(found.values())


@lru_cache(maxsize=4096)
def comparable_devices(devices: Devices, cluster: ClusterSpec) -> Devices:
    """Return the first devices of their kind that share machines in the same numbers as some devices.

    Costs are computed for these, so that they are computed once for groups that differ in nothing else.
    """
    numbers = cluster.machines(devices).values()
    first, per_machine = cluster.first_of_kind(devices[0]), cluster.devices_per_node
    return tuple(first + machine * per_machine + i for machine, num in enumerate(numbers) for i in range(num))


@lru_cache(maxsize=4096)
def assign_devices(
    sizes: tuple[int, ...], devices: Devices, cluster: ClusterSpec
) -> tuple[Devices, ...] | None:
    """Return the devices of each group, by their numbers; None if the groups cannot be placed like this.

    A group up to the size of a machine is within one machine, and a larger one begins with a whole one. Where
    the user has placed others on a part of a machine, a larger group may begin with the rest of one, too.
    Elsewhere that would only be more to try: whole machines divide into better groups. The largest groups
    come first; the others then fill the smallest gap that is large enough.
    """
    gaps = [list(run) for run in _by_machine(devices, cluster)]
    given: dict[int, Devices] = {}
    may_share = any(len(gap) < cluster.devices_per_node for gap in gaps)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taken = _take(sizes[index], gaps, cluster.devices_per_node, may_share)
        if taken is None:
            return None
        given[index] = taken
    return tuple(given[i] for i in range(len(sizes)))


def _take(size: int, gaps: list[list[int]], per_machine: int, may_share: bool) -> Devices | None:
    """Remove devices from the free ones of each machine."""
    if size <= per_machine:
        gap = min((gap for gap in gaps if len(gap) >= size), key=len, default=None)
        if gap is None:
            return None
        taken, gap[:] = gap[:size], gap[size:]
        return tuple(taken)
    for first, is_broken in _starts(size, gaps, per_machine, may_share):
        found: list[int] = []
        for last in range(first, len(gaps)):
            gap = gaps[last]
            if not is_broken and last > first and len(gap) < per_machine and len(found) + len(gap) < size:
                break
            found += gap
            if len(found) >= size:
                for used in gaps[first:last]:
                    used.clear()
                gap[:] = found[size:]
                return tuple(found[:size])
    return None


def _starts(
    size: int, gaps: Sequence[Sequence[int]], per_machine: int, may_share: bool
) -> Iterator[tuple[int, bool]]:
    """Yield where a group of more than one machine may begin, and whether it may leave out devices between.

    The best start is the rest of a machine with which the group ends at the end of another one, then a whole
    machine.
    """
    whole = [i for i, gap in enumerate(gaps) if len(gap) == per_machine]
    if not may_share:
        yield from ((first, False) for first in whole)
        return
    used = [i for i, gap in enumerate(gaps) if 0 < len(gap) < per_machine]
    exact = [i for i in used if len(gaps[i]) == size % per_machine]
    for is_broken in (False, True):
        for first in (*exact, *whole, *(i for i in used if i not in exact)):
            yield first, is_broken


@lru_cache(maxsize=8)
def _by_machine(devices: Devices, cluster: ClusterSpec) -> tuple[Devices, ...]:
    machines: dict[int, list[int]] = {}
    for device in devices:
        machines.setdefault(cluster.node_of(device), []).append(device)
    return tuple(tuple(run) for run in machines.values())


MAX_TENSOR_RANKS = 8
"""Most tensor ranks to choose: on more than one machine they would cost more time than they save memory."""
MAX_STAGES = 16
"""Most pipeline stages to choose."""
MAIN_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of stages to choose from on many devices."""
MOST_IDLE = 0.25
"""On few devices a replica may leave a smaller share than this unused; on many, other sizes of groups do."""


def layouts_for(problem: SearchProblem, name: str, devices: Devices, *, is_large: bool) -> list[Layout]:
    """Return the layouts of a replica on some devices. It may leave a few of them unused.

    Layouts that `run` refuses are left out if others are not refused, unless the problem allows them.

    Args:
        is_large: whether every other choice is enough.
    """
    if name in problem.layouts:
        return [layout for layout in (problem.layouts[name],) if layout.world <= len(devices)]
    layouts = list(dict.fromkeys(_layouts(problem, name, devices, is_large)))
    if problem.allows_planned_only:
        return layouts
    reasons = {layout: _num_reasons(problem, name, layout, devices) for layout in layouts}
    return [layout for layout in layouts if reasons[layout] == min(reasons.values())]


def _layouts(problem: SearchProblem, name: str, devices: Devices, is_large: bool) -> Iterator[Layout]:
    model, role = problem.replica(name).model, problem.replica(name).role
    shape = problem.request.shapes.get(model)
    limit, per_machine = problem.max_data_ranks.get(name, len(devices)), problem.cluster.devices_per_node
    experts = shape.experts if shape is not None and problem.traits(name).is_model_parallel else None
    num_experts = 1 if experts is None else experts.num
    for tensor, pipe in _cuts(problem, name, devices, is_large):
        copies = len(devices) // (tensor * pipe)
        near = max(1, per_machine // tensor)
        contexts = [1]
        if problem.divides_sequences and role != "gen" and shape is not None:
            contexts += [size for size in (2, 4, 8) if size <= near and copies % size == 0]
        for context in contexts:
            data = min(copies // context, limit)
            largest = math.gcd(data * context, num_experts)
            inside = [size for size in range(1, near + 1) if largest % size == 0]
            for expert in sorted({1, largest, *(inside[-1:] if is_large else inside)}):
                yield Layout(data, tensor, pipe, context, expert)
            if problem.traits(name).shards_weights and role != "gen":
                sets = _sets_of_machines(problem.cluster, devices[:data])
                yield from (Layout(data, replicate=num) for num in sets)


Cut = tuple[int, int, int, int, str]
"""Tensor, pipeline and context ranks, replicate axis, and whether experts are divided: over as many ranks as
can be, or over fewer."""


def cut_of(layout: Layout, shape: ModelShape | None) -> Cut:
    """Return the way in which a layout divides a model, whatever the number of devices."""
    experts = "no"
    if layout.expert > 1 and shape is not None and shape.experts is not None:
        is_most = layout.expert == math.gcd(layout.num_copies, shape.experts.num)
        experts = "most" if is_most else "fewer"
    return layout.tensor, layout.pipe, layout.context, layout.replicate, experts


def _sets_of_machines(cluster: ClusterSpec, devices: Devices) -> Iterator[int]:
    """Yield numbers of equal sets into which devices can be divided so that none shares a machine."""
    machines = list(cluster.machines(devices).values())
    if len(set(machines)) == 1 and machines[0] > 1:
        yield from (num for num in range(2, len(machines) + 1) if len(machines) % num == 0)


def _cuts(problem: SearchProblem, name: str, devices: Devices, is_large: bool) -> Iterator[tuple[int, int]]:
    """Yield the tensor ranks and stages into which a model can be cut."""
    num, backend = len(devices), problem.traits(name)
    shape = problem.request.shapes.get(problem.replica(name).model)
    if not backend.is_model_parallel or shape is None:
        yield 1, 1
        return
    specs = (*chain.from_iterable(kinds_of_layers(shape)), *other_tensors(shape))
    for tensor in range(1, min(num, MAX_TENSOR_RANKS) + 1):
        if not all(can_split(spec, backend, tensor) for spec in specs):
            continue
        most = min(num // tensor, shape.num_layers, MAX_STAGES) if backend.has_pipeline_axis else 1
        stages = MAIN_STAGES if is_large else range(1, MAX_STAGES + 1)
        for pipe in (number for number in stages if number <= most):
            used = num - num % (tensor * pipe)
            may_idle = num <= EVERY_SIZE and num - used < MOST_IDLE * num and pipe in MAIN_STAGES
            if used < num and not may_idle:
                continue
            if _in_one_machine(problem.cluster, devices, used, tensor):
                yield tensor, pipe


def _in_one_machine(cluster: ClusterSpec, devices: Devices, num: int, size: int) -> bool:
    """Return whether each block of this many neighbours among the first devices is on one machine."""
    return all(first % size == 0 for first in _first_on_machines(devices, cluster) if first < num)


@lru_cache(maxsize=64)
def _first_on_machines(devices: Devices, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the indices at which the devices of another machine begin."""
    machines = list(map(cluster.node_of, devices))
    return tuple(i for i, (one, other) in enumerate(pairwise(machines), 1) if one != other)


def _num_reasons(problem: SearchProblem, name: str, layout: Layout, devices: Devices) -> int:
    """Return for how many reasons a run would refuse a layout."""
    replica, request = problem.replica(name), problem.request
    shape, workers = request.shapes.get(replica.model), request.settings.get("workers")
    num = len(list(layout_reasons(replace(replica, layout=layout), workers, shape)))
    if replica.role == "gen":
        one = replace(layout, data=1, expert=1)
        copy = replace(replica, layout=one, workers=devices[: one.world])
        num += len(list(engine_kind(replica.backend).objections(served_model(copy, request))))
    return num
