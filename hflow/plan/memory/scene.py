"""`Scene`: a plan with what it was compiled from, and who sits on which device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hflow.plan.ir import DeviceGroup, Plan, WeightRoute
from hflow.plan.memory.rank import Rank
from hflow.plan.placement import SAVE_PREFIX
from hflow.plan.request import PlanRequest
from hflow.plan.routing import rank_order
from hflow.plan.workload import Workload, workloads

Ranks = tuple[Rank, ...]
"""The ranks on one device, in the plan's order of replicas."""


@dataclass(frozen=True)
class Scene:
    """What the memory of devices depends on."""

    plan: Plan
    request: PlanRequest

    @cached_property
    def lengths(self) -> dict[str, Workload]:
        """Root stream -> lengths of its samples.

        Raises:
            PlanError: when the assumed prompt leaves no room for a response.
        """
        return dict(workloads(self.plan, self.request))

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
