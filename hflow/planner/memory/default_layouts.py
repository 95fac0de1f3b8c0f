"""Layouts that the user did not set, of backends with tensor and pipeline axes: the fewest shards that fit.

Data parallelism alone needs the least communication, so it is tried first; then more tensor ranks within one
machine, then more pipeline stages. As long as a phase does not fit, the replica that holds most is split
further.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from hflow.planner.backends import training_backend, traits
from hflow.planner.forecast import PhaseMemory
from hflow.planner.hardware import GIB
from hflow.planner.ir import Plan, Replica
from hflow.planner.layout import Layout
from hflow.planner.memory.engine_load import engine_weights
from hflow.planner.memory.phases import GENERATE, WAKE, memory_phases
from hflow.planner.memory.rank import Rank
from hflow.planner.memory.with_layouts import MAX_TENSOR_RANKS, devices_of, with_layouts
from hflow.planner.model_shape import kinds_of_layers, other_tensors
from hflow.planner.request import PlanRequest
from hflow.planner.weights.sharding import can_split


@dataclass(frozen=True)
class ChosenLayout:
    """The layout that the planner chose for a replica, and the reason."""

    model: str
    replica: str
    layout: Layout
    why: str


def default_layouts(plan: Plan, request: PlanRequest) -> tuple[ChosenLayout, ...]:
    """Choose layouts for the replicas whose layout the user did not set.

    If no layout fits, the last one is returned: `check_memory` then refuses the plan and suggests a change.

    Raises:
        PlanError: when the assumed prompt leaves no room for a response.
    """
    undecided = [replica for replica in plan.replicas if _is_undecided(replica, request)]
    if not undecided or request.hardware is None:
        return ()
    known = dict(plan.shapes)
    reasons = {r.name: "data ranks alone fit" if r.model in known else _UNKNOWN for r in undecided}
    candidates = {r.name: _candidates(plan, r) for r in undecided if r.model in known}
    while overfull := _overfull_phase(plan, request):
        step = _split_largest(plan, request, overfull, candidates)
        if step is None:
            break
        plan, replica = step
        needed, available = overfull.total / GIB, plan.cluster.memory_bytes / GIB
        reasons[replica.name] = (
            f"with fewer cuts {overfull.phase} would need {needed:.1f} GiB of {available:.1f}"
        )
    layouts = {replica.name: replica.layout for replica in plan.replicas}
    return tuple(ChosenLayout(r.model, r.name, layouts[r.name], reasons[r.name]) for r in undecided)


_UNKNOWN = "data ranks alone, as its sizes are unknown"


def _is_undecided(replica: Replica, request: PlanRequest) -> bool:
    config = request.model(replica.model)
    layout = config.gen.layout if replica.role == "gen" else config.layout
    return layout is None and traits(replica.backend).is_model_parallel


def _overfull_phase(plan: Plan, request: PlanRequest) -> PhaseMemory | None:
    """Return the phase that needs most if it does not fit, else None."""
    largest = max(memory_phases(plan, request), key=lambda phase: phase.total, default=None)
    return largest if largest is not None and largest.total > plan.cluster.memory_bytes else None


def _split_largest(
    plan: Plan, request: PlanRequest, overfull: PhaseMemory, candidates: dict[str, Iterator[Layout]]
) -> tuple[Plan, Replica] | None:
    """Give the largest replica of the group that still has a candidate its next layout.

    Returns:
        The new plan and that replica, or None if no candidate is left.
    """
    replicas = [r for r in plan.replicas if r.group == overfull.group and r.name in candidates]
    if overfull.phase not in (GENERATE, WAKE):  # an engine needs less then, if anything
        replicas = [replica for replica in replicas if replica.role != "gen"]
    for replica in sorted(replicas, key=lambda r: -_state_bytes(plan, request, r)):
        for layout in candidates[replica.name]:
            changed = with_layouts(plan, request, [replica], [layout], len(devices_of(plan, replica.group)))
            if changed is not None:
                return changed, replica
    return None


def _state_bytes(plan: Plan, request: PlanRequest, replica: Replica) -> int:
    """Return the bytes that a rank of a replica holds between phases."""
    shape, on_cpu = dict(plan.shapes)[replica.model], plan.cluster.device == "cpu"
    rank = Rank(replica, shape, request.model(replica.model), 0, True, on_cpu)
    if replica.role == "gen":
        return engine_weights(rank)
    return training_backend(replica.backend).memory.model_state(rank).total()


def _candidates(plan: Plan, replica: Replica) -> Iterator[Layout]:
    """Yield layouts on all devices of a replica's group, each with more shards than the one before."""
    devices = devices_of(plan, replica.group)
    num_devices, shape = len(devices), dict(plan.shapes)[replica.model]
    specs = (*chain.from_iterable(kinds_of_layers(shape)), *other_tensors(shape))
    tensor_sizes = [
        size
        for size in range(1, min(num_devices, MAX_TENSOR_RANKS) + 1)
        if num_devices % size == 0
        and _in_one_machine(plan, devices, size)
        and all(can_split(spec, traits(replica.backend), size) for spec in specs)
    ]
    yield from (Layout(num_devices // size, size) for size in tensor_sizes[1:])
    if not traits(replica.backend).has_pipeline_axis:
        return
    tensor = tensor_sizes[-1]
    pipe_sizes = (size for size in range(2, shape.num_layers + 1) if num_devices % (size * tensor) == 0)
    yield from (Layout(num_devices // (size * tensor), tensor, size) for size in pipe_sizes)


def _in_one_machine(plan: Plan, devices: tuple[int, ...], size: int) -> bool:
    """Return whether blocks of this many neighbouring devices never cross machines."""
    blocks = (devices[first : first + size] for first in range(0, len(devices), size))
    return all(len({plan.cluster.node_of(device) for device in block}) == 1 for block in blocks)
