"""Layouts that nobody asked for, of backends with tensor and pipeline ranks: the fewest cuts that fit.

Data parallelism alone needs the least communication, so it comes first; then more tensor ranks, within one
machine, then more stages. Cut is always the replica that holds most, until every phase fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hflow.planner.backends import training_backend, traits
from hflow.planner.forecast import PhaseMemory
from hflow.planner.hardware import GIB
from hflow.planner.ir import Plan, Replica
from hflow.planner.layout import Layout
from hflow.planner.memory.context import MOST_TENSOR_RANKS, devices_of, with_layouts
from hflow.planner.memory.phases import memory_phases
from hflow.planner.memory.rank import Rank
from hflow.planner.model_shape import layer_template, other_tensors
from hflow.planner.request import PlanRequest
from hflow.planner.weights.sharding import can_share


@dataclass(frozen=True)
class Chosen:
    """The layout of one replica, and why it has it."""

    model: str
    replica: str
    layout: Layout
    why: str


def default_layouts(plan: Plan, request: PlanRequest) -> tuple[Chosen, ...]:
    """Layouts for the replicas that were laid out over the data axis as nobody asked for anything else.

    Where no layout fits, the last one that was tried: the plan is then refused with advice.

    Raises:
        PlanError: when the assumed prompt leaves no room for a response.
    """
    undecided = [replica for replica in plan.replicas if _is_undecided(replica, request)]
    if not undecided or request.hardware is None:
        return ()
    known = dict(plan.shapes)
    whys = {r.name: "data ranks alone fit" if r.model in known else _UNKNOWN for r in undecided}
    ladders = {r.name: _ladder(plan, r) for r in undecided if r.model in known}
    while over := _over(plan, request):
        step = _cut_largest(plan, request, over, ladders)
        if step is None:
            break
        plan, replica = step
        used = f"{over.phase} would need {over.total / GIB:.1f} GiB of {plan.cluster.memory_bytes / GIB:.1f}"
        whys[replica.name] = f"with fewer cuts {used}"
    layouts = {replica.name: replica.layout for replica in plan.replicas}
    return tuple(Chosen(r.model, r.name, layouts[r.name], whys[r.name]) for r in undecided)


_UNKNOWN = "data ranks alone, as its sizes are unknown"


def _is_undecided(replica: Replica, request: PlanRequest) -> bool:
    if replica.role == "gen" or not traits(replica.backend).is_model_parallel:
        return False
    return request.model(replica.model).layout is None


def _over(plan: Plan, request: PlanRequest) -> PhaseMemory | None:
    """The phase that needs most, if that is more than there is."""
    worst = max(memory_phases(plan, request), key=lambda phase: phase.total, default=None)
    return worst if worst is not None and worst.total > plan.cluster.memory_bytes else None


def _cut_largest(
    plan: Plan, request: PlanRequest, over: PhaseMemory, ladders: dict[str, Iterator[Layout]]
) -> tuple[Plan, Replica] | None:
    """The plan with the next layout of the largest replica there that has one; None: nothing is left."""
    there = [r for r in plan.replicas if r.group == over.group and r.name in ladders]
    for replica in sorted(there, key=lambda r: -_held(plan, request, r)):
        for layout in ladders[replica.name]:
            changed = with_layouts(plan, request, [replica], [layout], len(devices_of(plan, replica.group)))
            if changed is not None:
                return changed, replica
    return None


def _held(plan: Plan, request: PlanRequest, replica: Replica) -> int:
    """Bytes that a rank of a replica keeps."""
    shape, on_cpu = dict(plan.shapes)[replica.model], plan.cluster.device == "cpu"
    rank = Rank(replica, shape, request.model(replica.model), 0, True, on_cpu)
    return training_backend(replica.backend).memory.model_state(rank).total()


def _ladder(plan: Plan, replica: Replica) -> Iterator[Layout]:
    """Layouts on all devices of a replica's group, each cut more often than the one before."""
    devices = devices_of(plan, replica.group)
    num, shape, facts = len(devices), dict(plan.shapes)[replica.model], traits(replica.backend)
    specs = (*layer_template(shape), *other_tensors(shape))
    tensor = [
        size
        for size in range(1, min(num, MOST_TENSOR_RANKS) + 1)
        if num % size == 0
        and _in_one_machine(plan, devices, size)
        and all(can_share(spec, facts, size) for spec in specs)
    ]
    yield from (Layout(num // size, size) for size in tensor[1:])
    most = tensor[-1]
    pipes = (size for size in range(2, shape.num_layers + 1) if num % (size * most) == 0)
    yield from (Layout(num // (size * most), most, size) for size in pipes)


def _in_one_machine(plan: Plan, devices: tuple[int, ...], size: int) -> bool:
    blocks = (devices[first : first + size] for first in range(0, len(devices), size))
    return all(len({plan.cluster.node_of(device) for device in block}) == 1 for block in blocks)
