"""`MemoryContext`: a plan with what it was compiled from, and who sits on which device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hflow.errors import PlanError
from hflow.planner.ir import SAVE_PREFIX, DeviceGroup, Plan, Replica, WeightRoute
from hflow.planner.layout import Layout
from hflow.planner.layout_checks import check_layouts
from hflow.planner.memory.rank import Rank
from hflow.planner.request import PlanRequest
from hflow.planner.routing import rank_order
from hflow.planner.stream_workloads import stream_workloads
from hflow.planner.workload import Workload

Ranks = tuple[Rank, ...]
"""The ranks on one device, in the plan's order of replicas."""


@dataclass(frozen=True)
class MemoryContext:
    """What the memory of devices depends on."""

    plan: Plan
    request: PlanRequest

    @cached_property
    def lengths(self) -> dict[str, Workload]:
        """Root stream -> lengths of its samples.

        Raises:
            PlanError: when the assumed prompt leaves no room for a response.
        """
        return dict(stream_workloads(self.plan, self.request))

    def route_to(self, rank: Rank) -> WeightRoute | None:
        """How an engine gets its weights; None where nobody changes them."""
        return next((route for route in self.plan.weights if route.dst == rank.replica.name), None)

    def routes_from(self, rank: Rank) -> list[WeightRoute]:
        """Whom a training replica gives its weights."""
        return [route for route in self.plan.weights if route.src == rank.replica.name]

    def verb(self, node: str) -> str:
        """The verb of a batch node; that of a node that saves is `save`."""
        return "save" if node.startswith(SAVE_PREFIX) else self.plan.graph.node(node).spec.verb

    def seats(self, group: DeviceGroup) -> list[tuple[Ranks, tuple[int, ...]]]:
        """Devices of a group that are alike, with the ranks that each of them has."""
        ranks: dict[int, list[int]] = {device: [] for device in group.devices}
        kinds: list[Rank] = []
        for found, workers in self._kinds(group.name):
            for worker in workers:
                ranks[worker].append(len(kinds))
            kinds.append(found)
        alike: dict[tuple[int, ...], list[int]] = {}
        for device, indices in ranks.items():
            alike.setdefault(tuple(indices), []).append(device)
        return [(tuple(kinds[i] for i in key), tuple(devices)) for key, devices in alike.items()]

    def _kinds(self, group: str) -> Iterator[tuple[Rank, Iterable[int]]]:
        """Ranks of a group's replicas that are alike, with their workers, where sizes are known."""
        shapes, on_cpu = dict(self.plan.shapes), self.plan.cluster.device == "cpu"
        for replica in self.plan.replicas:
            if replica.group != group or replica.model not in shapes:
                continue
            order, asked = rank_order(replica.role), self.request.model(replica.model)
            workers: dict[tuple[int, bool], list[int]] = {}
            for index, worker in enumerate(replica.workers):
                stage = replica.layout.coords(order, index)[2]
                workers.setdefault((stage, index == 0), []).append(worker)
            for kind, alike in workers.items():
                yield Rank(replica, shapes[replica.model], asked, *kind, on_cpu), alike


# -------------------- A plan with other layouts of some replicas, as far as memory depends on them.


MOST_TENSOR_RANKS = 8
"""Tensor ranks on more than one machine would cost more time than they save memory."""


def devices_of(plan: Plan, group: str) -> tuple[int, ...]:
    """The devices of a group."""
    return next(g.devices for g in plan.groups if g.name == group)


def with_layouts(
    plan: Plan,
    request: PlanRequest,
    replicas: Sequence[Replica],
    layouts: Sequence[Layout],
    num_devices: int,
) -> Plan | None:
    """The plan with other layouts in a group of that many devices; None where one cannot be."""
    name = replicas[0].group
    at_hand = devices_of(plan, name)
    devices = at_hand if len(at_hand) == num_devices else tuple(range(num_devices))
    changed = {
        replica.name: replace(
            replica,
            layout=layout,
            workers=devices[: layout.world],
            heads=tuple(devices[rank] for rank in layout.heads(rank_order(replica.role))),
        )
        for replica, layout in zip(replicas, layouts, strict=True)
        if layout.world <= num_devices
    }
    if len(changed) < len(replicas) or not _can_be(plan, request, changed.values()):
        return None
    groups = [DeviceGroup(name, devices) if g.name == name else g for g in plan.groups]
    found = tuple(changed.get(replica.name, replica) for replica in plan.replicas)
    return replace(plan, groups=tuple(groups), replicas=found)


def _can_be(plan: Plan, request: PlanRequest, replicas: Iterable[Replica]) -> bool:
    """Whether layouts divide their models, and every dp rank has a sample of every minibatch."""
    stream = plan.schedule.streams[0]
    most_cuts = max((cut.minibatches for _, cut in plan.cuts), default=1)
    num_samples = (stream.batch or 1) // most_cuts * stream.group_size
    if any(r.role != "gen" and r.layout.data > num_samples for r in replicas):
        return False
    try:
        check_layouts(replicas, request)
    except PlanError:
        return False
    return True
