"""The phases of each device group, and what its devices hold in them."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.plan.forecast import Parts, PhaseMemory
from hflow.plan.ir import DeviceGroup, Level, Plan
from hflow.plan.memory.resident import GENERATE, WAKE, resident
from hflow.plan.memory.scene import Scene
from hflow.plan.memory.transient import transient, used_replica
from hflow.plan.request import PlanRequest


def memory_phases(plan: Plan, request: PlanRequest) -> tuple[PhaseMemory, ...]:
    """Bytes on every device in every phase of its group's step; devices with the same bytes share a row.

    Models whose sizes are unknown are left out, and so are the nodes that run on them. The last data ranks,
    which hold less where a number of rows does not divide, count as much as the first.

    Raises:
        PlanError: when the assumed prompt leaves no room for a response.
    """
    scene = Scene(plan, request)
    return tuple(row for group in plan.groups for row in _rows(scene, group))


def unknown_models(plan: Plan) -> tuple[str, ...]:
    """Models whose sizes the planner does not know, so that their memory is left out."""
    known = dict(plan.shapes)
    return tuple(dict.fromkeys(r.model for r in plan.replicas if r.model not in known))


def _rows(scene: Scene, group: DeviceGroup) -> Iterator[PhaseMemory]:
    seats = scene.seats(group)
    for phase, gathered in _phases(scene, group):
        alike: dict[tuple[Parts, Parts], list[int]] = {}
        for ranks, seated in seats:
            stays = resident(scene, ranks, phase, gathered)
            passes = transient(scene, ranks, phase, stays.total())
            parts = tuple(stays.items()), tuple(passes.items())
            alike.setdefault(parts, []).extend(seated)
        for parts, devices in alike.items():
            yield PhaseMemory(group.name, tuple(sorted(devices)), phase, *parts)


def _phases(scene: Scene, group: DeviceGroup) -> Iterator[tuple[str, frozenset[str]]]:
    """Each phase of a group's step, and the other replicas that an inference left gathered.

    The step is gone through twice, as what its end leaves is there at the next one's beginning.
    """
    names = _phase_names(scene, group)
    gathered: frozenset[str] = frozenset()
    for is_second in (False, True):
        for phase in names:
            used = frozenset(used_replica(scene, phase))
            if is_second:
                yield phase, gathered - used
            if used and scene.verb(phase) == "infer":
                gathered |= used
            elif used and scene.verb(phase) == "train":
                gathered -= used


def _phase_names(scene: Scene, group: DeviceGroup) -> list[str]:
    plan, unknown = scene.plan, unknown_models(scene.plan)
    known = {r.name: r for r in plan.replicas if r.group == group.name and r.model not in unknown}
    generates = any(replica.role == "gen" for replica in known.values())
    sends = any(route.src in known and route.how == "pull" for route in plan.weights)
    arrivals = [n.name for n in plan.schedule.nodes if n.level is not Level.BATCH and n.group == group.name]
    nodes = (*arrivals, *dict(plan.schedule.orders).get(group.name, ()))
    return [
        *([GENERATE] if generates else []),
        *([WAKE] if generates or sends else []),
        *(node for node in nodes if all(name in known for name in used_replica(scene, node))),
    ]
