"""The plan as a value: where every node runs, in which order, and which bytes move.

Frozen rows only, JSON-serialisable, with a digest; nothing here is a live object. `Schedule`
is the part that the state machine reads, so that tests can write one by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import Graph, Level
from hflow.planner.forecast import Forecast
from hflow.planner.hardware import Hardware
from hflow.planner.layout import Layout
from hflow.planner.model_shape import ModelShape


@dataclass(frozen=True)
class ClusterSpec:
    """Devices to plan for: `num_nodes` machines with `devices_per_node` each."""

    name: str
    device: str
    """`cpu` or `cuda`: what torch calls the device."""
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    """Memory of one device."""
    cores: tuple[int, ...] = ()
    """Processor cores that the worker of each device of a machine is bound to; empty: none is bound."""

    def cores_of(self, device: int) -> range:
        """The cores of a device's worker, counted on its machine; empty where it is not bound."""
        place = device % self.devices_per_node
        return range(sum(self.cores[:place]), sum(self.cores[: place + 1]))

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """The machine that holds a device."""
        return device // self.devices_per_node


@dataclass(frozen=True)
class DeviceGroup:
    """Devices whose replicas take turns. One worker per device: a worker's index is its device's."""

    name: str
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Replica:
    """One copy of a model on one group: `actor@train`, `actor@gen`, `ref@infer`."""

    name: str
    model: str
    role: Literal["train", "infer", "gen"]
    backend: str
    """`torch` (training engine) or `embedded` (generation engine)."""
    layout: Layout
    group: str
    workers: tuple[int, ...]
    """rank -> worker index."""
    heads: tuple[int, ...]
    """dp index -> worker index of its dp-head."""


@dataclass(frozen=True)
class Placement:
    """Where one node runs."""

    node: str
    group: str | None
    """The device group in whose order it takes part, or on which it runs as samples arrive; None for sample
    and group computes."""
    replicas: tuple[str, ...]
    """The replicas that it uses (engines of a generate node, the model of infer and train)."""
    heads: tuple[int, ...]
    """dp index -> worker that receives its data; one worker for batch computes."""


@dataclass(frozen=True)
class OrderEdge:
    """Two nodes that share a group, in its cyclic order; the last wraps to the first with lag 1."""

    group: str
    src: str
    dst: str
    lag: int


@dataclass(frozen=True)
class RoutingRow:
    """One row of the routing table (shard key -> worker)."""

    key: str
    worker: int


@dataclass(frozen=True)
class BatchCut:
    """How a train node cuts its batch, seeded by step, before the split over ranks."""

    minibatches: int
    epochs: int
    by_group: bool
    """Whether a group must stay on one dp rank (PerGroup losses, bodies that read groups)."""


@dataclass(frozen=True)
class EdgeRule:
    """The frozen rule by which one node's inputs are redistributed in every step."""

    consumer: str
    stream: str
    fields: tuple[str, ...]
    """Fields that the consumer reads, `stream/field`, sorted."""
    heads: tuple[int, ...]
    """Consumer's dp-heads (worker indices)."""
    by_group: bool
    policy: Literal["balanced", "single"]
    """`balanced`: locality first, then tokens. `single`: everything to the one head."""


@dataclass(frozen=True)
class RouteRow:
    """One slice of a tensor, who holds it at the source and who needs it at the destination.

    Layers that are cut alike share a row: `tensor` has `{}` for the layer's index then. A receiver that
    is a holder has the slice already. Another takes it from a holder on its own machine, or else from
    any; `hflow.planner.weights.resharding.senders` says from which.
    """

    tensor: str
    layers: tuple[int, int] | None
    """`[first, last)` of the layers that the row stands for; None for a tensor outside the layers."""
    box: tuple[tuple[int, int], ...]
    """`(start, stop)` on each axis of the checkpoint's tensor."""
    holders: int
    """Index in `WeightRoute.worker_sets`."""
    receivers: int
    """Index in `WeightRoute.worker_sets`."""


@dataclass(frozen=True)
class WeightRoute:
    """How one replica's weights reach another replica of the same model."""

    model: str
    src: str
    dst: str
    how: Literal["shared", "gather", "pull"]
    """`shared`: same storage (d1, same worker). `gather`: all-gathered by bucket into the copy on
    the same workers. `pull`: gathered, then pulled through the object store by other workers."""
    worker_sets: tuple[tuple[int, ...], ...] = ()
    """Sets of workers that rows name by their index."""
    rows: tuple[RouteRow, ...] = ()
    """Empty where the model's sizes are unknown."""
    moved_bytes: int = 0
    """Bytes that all receivers together take from other workers: the least that there can be, given what
    each of them holds."""
    node_bytes: int = 0
    """Those among them that cross machines."""
    held_bytes: int = 0
    """Bytes of the destination that its workers hold already."""
    transport: Literal["", "store", "disk"] = ""
    """What is pulled goes through the object store, or through files in the run's directory."""
    why: str = ""
    """The reason for that."""


def batch_replica(replicas: Iterable[Replica], model: str) -> Replica:
    """Return the replica of a model that batch nodes use."""
    return next(r for r in replicas if r.model == model and r.role != "gen")


def generation_replica(replicas: Iterable[Replica], model: str) -> Replica:
    """Return the replica of a model that generates."""
    return next(r for r in replicas if r.model == model and r.role == "gen")


SAVE_PREFIX = "save."
"""Prefix of the nodes that save models: the node `save.NAME` saves model NAME."""

PUBLISH_PREFIX = "publish."
"""Before a generation replica's name: its weights are published (`Schedule.publishers`)."""


@dataclass(frozen=True)
class ScheduledStream:
    """A root stream as the state machine sees it (derived streams share their root's samples)."""

    name: str
    source: str
    group_size: int
    """Samples a group (G); sample ids of group g are `g * G ... g * G + G - 1`."""
    batch: int | None
    """Groups a batch; None for side streams (evaluation), which run their whole dataset."""
    replicas: tuple[str, ...]
    """Generation replicas that the source uses; empty when an encode node opens the stream."""
    models: tuple[str, ...]
    """Models whose weights the source reads."""
    min_group: int = 1
    """A group with fewer members left than this is refused."""
    every: int = 1
    after: int = 0
    """For side streams: evaluated at version v >= after with (v - after) % every == 0, and at the end."""


@dataclass(frozen=True)
class ScheduledNode:
    """A node other than a stream's source, as the state machine sees it."""

    name: str
    level: Level
    """When it fires; a per-sample body behind a batch node is scheduled at `batch`."""
    stream: str
    """Root stream."""
    needs: tuple[str, ...]
    """Nodes that must be done before it for the same sample, group or step (data, overwrite)."""
    group: str | None = None
    """Device group whose turn it takes, of a batch node; of another, the devices on which it runs as samples
    and groups arrive, in no turn. None: no device, or the workers' own processes."""
    reads: tuple[str, ...] = ()
    """Models whose weights of exactly this step's start it reads (lag 1)."""
    writes: tuple[str, ...] = ()
    keep: bool = False
    """Whether it returns `keep`: a False refuses the sample or group."""
    every: int = 1
    after: int = 0
    """Batch nodes fire at step k >= after with (k - after) % every == 0."""
    at_end: bool = False
    """Fires at the last step too, whatever `every` says (saving)."""


@dataclass(frozen=True)
class Schedule:
    """Everything that `RunState` knows."""

    streams: tuple[ScheduledStream, ...]
    """The trained stream (with a batch) first, then side streams."""
    nodes: tuple[ScheduledNode, ...]
    orders: tuple[tuple[str, tuple[str, ...]], ...]
    """group -> its batch nodes in cyclic order."""
    shared: tuple[tuple[str, tuple[str, ...]], ...]
    """group -> generation replicas that share it with batch nodes: their turn opens each cycle."""
    num_steps: int
    publishers: tuple[tuple[str, str], ...] = ()
    """Generation replica that shares no group with batch nodes, and whose weights change -> the group that
    trains them, where they are published."""
    settings: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass(frozen=True)
class Plan:
    """The whole plan of one recipe on one cluster."""

    recipe: str
    graph: Graph
    cluster: ClusterSpec
    groups: tuple[DeviceGroup, ...]
    replicas: tuple[Replica, ...]
    placements: tuple[Placement, ...]
    order: tuple[OrderEdge, ...]
    routing: tuple[RoutingRow, ...]
    rules: tuple[EdgeRule, ...]
    cuts: tuple[tuple[str, BatchCut], ...]
    """train node -> how it cuts its batch."""
    weights: tuple[WeightRoute, ...]
    schedule: Schedule
    shapes: tuple[tuple[str, ModelShape], ...]
    """Model -> its sizes, where the planner knows the family."""
    settings: tuple[tuple[str, Any], ...]
    """Bound values that change results (models, optimizers, data, seed), flattened and sorted."""
    staleness_bound: int | None
    """Largest version lag that a trained token can have; None where no rule bounds it."""
    warnings: tuple[str, ...] = ()
    hardware: Hardware | None = None
    """Figures that the forecast is made with; no part of the digest, as they decide nothing in a run."""
    forecast: Forecast | None = None
    """Estimates of bytes and seconds; no part of the digest either."""
    digest: str = ""

    def replica(self, name: str) -> Replica:
        """The replica of that name."""
        return next(r for r in self.replicas if r.name == name)

    def placement(self, node: str) -> Placement:
        """Where a node runs."""
        return next(p for p in self.placements if p.node == node)

    def rule(self, node: str) -> EdgeRule:
        """The redistribution rule of a batch node."""
        return next(r for r in self.rules if r.consumer == node)
