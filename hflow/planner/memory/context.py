"""`MemoryContext`: a plan with its request, and the ranks on each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hflow.planner.forecast import MemoryCategory
from hflow.planner.graph_queries import root_stream
from hflow.planner.ir import SAVE_PREFIX, DeviceGroup, Plan, WeightRoute
from hflow.planner.memory.items import ItemKey, Items, item
from hflow.planner.memory.microbatch import MicroBatch, largest_microbatch
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
    def workloads(self) -> dict[str, Workload]:
        """Lengths of the samples of each root stream.

        Raises:
            PlanError: when the assumed prompt leaves no room for a response.
        """
        return dict(stream_workloads(self.plan, self.request))

    def route_to(self, rank: Rank) -> WeightRoute | None:
        """Return how an engine receives its weights, or None where they never change."""
        return next((route for route in self.plan.weights if route.dst == rank.replica.name), None)

    def shares_weights(self, rank: Rank) -> bool:
        """Return whether an engine uses the fp32 weights of its trainer in place."""
        route = self.route_to(rank)
        return route is not None and route.how == "shared" and rank.config.compute_dtype == "fp32"

    def routes_from(self, rank: Rank) -> list[WeightRoute]:
        """Return the routes on which a training replica sends its weights."""
        return [route for route in self.plan.weights if route.src == rank.replica.name]

    def largest_microbatch(self, rank: Rank, node: str) -> MicroBatch:
        """Return the largest micro-batch that a rank computes at a node."""
        graph_node = self.plan.graph.node(node)
        workload = self.workloads[root_stream(self.plan.graph, graph_node).name]
        batch = largest_microbatch(self.plan, graph_node, workload, rank.config, rank.data)
        return batch.divided(rank.replica.layout.context)

    def verb(self, node: str) -> str:
        """Return the verb of a batch node; that of a node that saves a model is `save`."""
        return "save" if node.startswith(SAVE_PREFIX) else self.plan.graph.node(node).spec.verb

    @cached_property
    def nodes_of_workers(self) -> dict[int, Items]:
        """What the nodes that run on each worker keep there, as their node types state it."""
        held: dict[int, Items] = {}
        for node in self.plan.graph.nodes:
            if not node.spec.memory:
                continue
            for worker in self.plan.workers_of(node.name):
                kept = item(MemoryCategory.RUNTIME, node.spec.memory, f"{node.name} (node)")
                held[worker] = held.get(worker, Items()) + kept
        return held

    def ranks_of_devices(self, group: DeviceGroup) -> list[tuple[Ranks, tuple[int, ...]]]:
        """Return the ranks on the devices of a group, with the devices that hold the same."""
        kinds: list[Rank] = []
        kinds_on: dict[int, list[int]] = {device: [] for device in group.devices}
        for rank, workers in self._kinds_of_ranks(group.name):
            for worker in kinds_on.keys() & set(workers):
                kinds_on[worker].append(len(kinds))
            kinds.append(rank)
        equal: dict[tuple[tuple[int, ...], frozenset[tuple[ItemKey, int]]], list[int]] = {}
        for device, indices in kinds_on.items():
            kept = frozenset(self.nodes_of_workers.get(device, Items()).items())
            equal.setdefault((tuple(indices), kept), []).append(device)
        return [(tuple(kinds[i] for i in indices), tuple(devices)) for (indices, _), devices in equal.items()]

    def _kinds_of_ranks(self, group: str) -> Iterator[tuple[Rank, Iterable[int]]]:
        """Yield the different ranks of a group's replicas with all their workers, where sizes are known."""
        shapes, on_cpu = dict(self.plan.shapes), self.plan.cluster.device == "cpu"
        for replica in self.plan.replicas:
            if group not in replica.groups or replica.model not in shapes:
                continue
            order, config = rank_order(replica.role), self.request.model(replica.model)
            workers_of: dict[tuple[int, bool], list[int]] = {}
            for index, worker in enumerate(replica.workers):
                stage = replica.layout.coords(order, index)[2]
                workers_of.setdefault((stage, index == 0), []).append(worker)
            for (stage, is_first), workers in workers_of.items():
                yield Rank(replica, shapes[replica.model], config, stage, is_first, on_cpu), workers
