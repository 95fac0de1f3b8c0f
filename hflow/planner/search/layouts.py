"""`layouts_for`: the layouts with which a replica can use some devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise

from hflow.planner.checks.unrunnable import layout_reasons
from hflow.planner.make.replicas import Devices
from hflow.planner.models.choices import served_model
from hflow.planner.models.descriptors import engine_kind
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.layout import Layout
from hflow.planner.plan.model_shape import kinds_of_layers, other_tensors
from hflow.planner.search.devices import EVERY_SIZE
from hflow.planner.search.problem import SearchProblem
from hflow.planner.weights.sharding import can_split

MAX_TENSOR_RANKS = 8
"""Most tensor ranks to choose: on more than one machine they would cost more time than they save memory."""
MAX_STAGES = 16
"""Most pipeline stages to choose."""
MAIN_STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of stages to choose from on many devices."""
MOST_IDLE = 0.25
"""On few devices a replica may leave a smaller share than this unused; on many, other sizes of groups do."""


def layouts_for(problem: SearchProblem, name: str, devices: Devices, *, is_large: bool) -> list[Layout]:
    """Return the layouts of a replica on some devices, of which it may leave a few unused.

    Layouts that `run` refuses are left out if others are not refused, unless the problem allows them.

    Args:
        problem: says what is set.
        name: of the replica.
        devices: of its group.
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
        num += len(list(engine_kind(replica.backend).check(served_model(copy, request))))
    return num
