"""Which replicas a graph needs, and on which devices they lie.

A model that a train node writes has a replica `NAME@train`; another whose weights a batch node
reads or updates has `NAME@infer`; a model that generation reads has `NAME@gen` besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hflow.errors import PlanError, nearest
from hflow.graph.ir import Graph, Node
from hflow.planner.ir import DeviceGroup, Replica
from hflow.planner.layout import Layout
from hflow.planner.placement.device_groups import device_groups
from hflow.planner.request import PlanRequest
from hflow.planner.routing import rank_order

Role = Literal["train", "infer", "gen"]
EVERYTHING = "all"
"""The group of models that none is named for: with no other group, it holds all devices."""


@dataclass(frozen=True)
class Demand:
    """A replica before it has devices."""

    model: str
    role: Role
    group: str
    layout: Layout | None
    backend: str

    @property
    def name(self) -> str:
        """The replica's name, `actor@train`."""
        return f"{self.model}@{self.role}"


def is_source(node: Node) -> bool:
    """Whether a node opens a stream (generate, encode)."""
    return node.spec.opens_stream


def trained_models(graph: Graph) -> tuple[str, ...]:
    """Models that a node other than an update writes, in the recipe's order."""
    written = {m for node in graph.nodes if node.spec.verb != "update" for m in node.spec.writes_weights}
    return tuple(model.name for model in graph.models if model.name in written)


def written_models(graph: Graph) -> frozenset[str]:
    """Models whose weights change in the run."""
    return frozenset(model for node in graph.nodes for model in node.spec.writes_weights)


def saved_models(graph: Graph) -> tuple[str, ...]:
    """Models whose weights change, in the recipe's order: a checkpoint holds them."""
    written = written_models(graph)
    return tuple(model.name for model in graph.models if model.name in written)


def place_replicas(graph: Graph, request: PlanRequest) -> tuple[tuple[DeviceGroup, ...], tuple[Replica, ...]]:
    """Give every replica its group, layout and workers.

    Raises:
        PlanError: for unknown models or groups, and layouts larger than their group.
    """
    known = [model.name for model in graph.models]
    for name in request.models:
        if name not in known:
            raise PlanError(f"recipe {graph.name!r} has no model {name!r}{nearest(name, known)}")
    demands = _demands(graph, request)
    wanted: dict[str, int | None] = {}
    for demand in demands:
        sizes = [wanted.get(demand.group), demand.layout.world if demand.layout else None]
        wanted[demand.group] = max((size for size in sizes if size is not None), default=None)
    groups = device_groups(request.cluster, request.groups, wanted or {EVERYTHING: None})
    return tuple(groups.values()), tuple(_place(demand, groups[demand.group]) for demand in demands)


def batch_replica(replicas: tuple[Replica, ...], model: str) -> Replica:
    """The replica of a model that batch nodes use."""
    return next(r for r in replicas if r.model == model and r.role != "gen")


def gen_replica(replicas: tuple[Replica, ...], model: str) -> Replica:
    """The replica of a model that generates."""
    return next(r for r in replicas if r.model == model and r.role == "gen")


def replica_roles(graph: Graph) -> list[tuple[str, Role]]:
    """Model and role of every replica that the graph needs."""
    in_batches = {m for node in graph.nodes if not is_source(node) for m in _weights(node)}
    generating = {m for node in graph.nodes if is_source(node) for m in node.spec.reads_weights}
    trained = trained_models(graph)
    roles: list[tuple[str, Role]] = []
    for model in (spec.name for spec in graph.models):
        if model in in_batches:
            roles.append((model, "train" if model in trained else "infer"))
        if model in generating:
            roles.append((model, "gen"))
    return roles


def _demands(graph: Graph, request: PlanRequest) -> list[Demand]:
    trained = trained_models(graph)
    named = [request.models[m].group for m in trained if m in request.models]
    default = next((group for group in named if group), EVERYTHING)
    demands = []
    for model, role in replica_roles(graph):
        asked = request.model(model)
        group = asked.group or default
        if role == "gen":
            gen_group = asked.gen_group or group
            demands.append(Demand(model, role, gen_group, _layout(asked.gen_layout), asked.engine))
        else:
            demands.append(Demand(model, role, group, _layout(asked.layout), asked.backend))
    return demands


def _weights(node: Node) -> tuple[str, ...]:
    return (*node.spec.reads_weights, *node.spec.writes_weights)


def _layout(text: str | None) -> Layout | None:
    return None if text is None else Layout.parse(text)


def _place(demand: Demand, group: DeviceGroup) -> Replica:
    layout = demand.layout or Layout(data=len(group.devices))
    if layout.world > len(group.devices):
        raise PlanError(
            f"{demand.name}: layout {layout} needs {layout.world} devices, but group {group.name!r} "
            f"has {len(group.devices)}; {_advice(layout, len(group.devices))}"
        )
    workers = group.devices[: layout.world]
    heads = tuple(workers[rank] for rank in layout.heads(rank_order(demand.role)))
    return Replica(demand.name, demand.model, demand.role, demand.backend, layout, group.name, workers, heads)


def _advice(layout: Layout, num_devices: int) -> str:
    """The nearest layout that fits, by shrinking the data axis, or how many devices to add."""
    data = num_devices // (layout.tensor * layout.pipe)
    if data:
        return f"{Layout(data, layout.tensor, layout.pipe)} fits"
    return f"give it {layout.tensor * layout.pipe} devices or more, or a smaller t or p"
