"""The rows of a plan: where every node runs, in which order, and which bytes move.

All rows are frozen and can be written as JSON. `Schedule` is the part that the state machine reads; it
depends on nothing else of the plan, so tests can write one by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from hflow.config.schema import ScheduleConfig
from hflow.graph.ir import Graph, Level
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.forecast import Forecast
from hflow.planner.plan.hardware import Hardware
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import LEFT_OUT_BY_DEFAULT, ModelShape
from hflow.types.kernels import LayerKernels


@dataclass(frozen=True)
class DeviceGroup:
    """Devices with the same replicas, which take turns. Each device has one worker, with the same index.

    Groups are disjoint. A replica on devices that others use only in part is in several groups.
    """

    name: str
    devices: tuple[int, ...]


def devices_of(groups: Sequence[DeviceGroup]) -> tuple[int, ...]:
    """Return the devices of a replica's groups, in the order in which it uses them."""
    return joined_devices([group.devices for group in groups])


def joined_devices(sets: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return disjoint sets of devices as one, in the order in which a replica uses them.

    Those of several sets are in ascending order, so that neighbouring ranks are on the same machine.
    """
    return sets[0] if len(sets) == 1 else tuple(sorted(chain(*sets)))


@dataclass(frozen=True)
class Replica:
    """One copy of a model's weights on one or more device groups: `actor@train`, `actor@gen`, `ref@infer`."""

    name: str
    model: str
    role: Literal["train", "infer", "gen"]
    backend: str
    """The training backend, such as `torch`, or the generation engine, such as `embedded`."""
    layout: Layout
    groups: tuple[str, ...]
    """The device groups that it uses, in the order of their first devices."""
    workers: tuple[int, ...]
    """rank -> worker index."""
    heads: tuple[int, ...]
    """dp index -> worker index of its dp-head."""
    adapter_parameters: int = field(default=0, metadata=LEFT_OUT_BY_DEFAULT)
    """Parameters of the low-rank adapters that are trained in place of its weights; 0: it has no adapters, or
    the planner does not know its sizes."""
    dtype: str = field(default="fp32", metadata=LEFT_OUT_BY_DEFAULT)
    """Precision of its forward and backward passes: `fp32` or `bf16`. What the optimizer changes is fp32."""
    base_of: str = field(default="", metadata=LEFT_OUT_BY_DEFAULT)
    """The replica of another model whose weights it uses, without the adapters of that model. It has adapters
    of its own if `adapter_parameters` is not 0. Empty: it has weights of its own."""
    merges_adapters: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    """Whether an engine adds the adapters that it receives to its weights, of which it keeps a copy in host
    memory. Otherwise it has them beside its weights."""

    def __hash__(self) -> int:
        """Return a hash of what usually differs, as replicas of many workers are keys of tables."""
        return hash((self.name, self.layout, len(self.workers), self.workers[:1]))


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a generation replica, the reason for it, and its KV cache."""

    replica: str
    engine: str
    why: str
    cache_bytes: int | None = None
    """Bytes of KV cache that each rank allocates; None if the cache grows as needed, or the plan has no
    figures of the devices. No result depends on it."""
    largest_batch: int | None = None
    """Sequences of mean length that the cache of one engine holds; None as `cache_bytes`."""


@dataclass(frozen=True)
class AttentionChoice:
    """The attention kernel of a replica, and the reason for it."""

    replica: str
    kernel: str
    why: str


@dataclass(frozen=True)
class LayerChoice:
    """The kernels of a replica's layers, of a backend that has different ones, and the reason for them."""

    replica: str
    kernels: LayerKernels
    version: str | None
    """Version of the package that has them; None for torch."""
    why: str


@dataclass(frozen=True)
class Placement:
    """The workers that one node runs on."""

    node: str
    groups: tuple[str, ...]
    """The device groups in whose order it runs, or on which it runs as samples arrive; empty for per-sample
    and per-group computes."""
    replicas: tuple[str, ...]
    """The replicas that it uses: engines of a generate node, the model of an infer or train node."""
    heads: tuple[int, ...]
    """dp index -> worker that receives its data; a batch compute has one worker."""


@dataclass(frozen=True)
class OrderEdge:
    """Two consecutive nodes in the cyclic order of some groups; the last wraps to the first with lag 1."""

    groups: tuple[str, ...]
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
    """The cut of a train node's batch into minibatches, before these are split over ranks."""

    minibatches: int
    epochs: int
    by_group: bool
    """Whether a group must stay on one dp rank, as for PerGroup losses and bodies that read groups."""


@dataclass(frozen=True)
class EdgeRule:
    """The rule by which one node's inputs are redistributed in every step."""

    consumer: str
    stream: str
    fields: tuple[str, ...]
    """Fields that the consumer reads, `stream/field`, sorted."""
    heads: tuple[int, ...]
    """Consumer's dp-heads (worker indices)."""
    by_group: bool
    policy: Literal["balanced", "single"]
    """`balanced`: samples stay where they are as far as token counts stay even. `single`: all samples go to
    the one head."""


@dataclass(frozen=True)
class RouteRow:
    """One slice of a tensor, with the workers that hold it and the workers that need it.

    Layers that are cut in the same way share a row, with `{}` for the layer index in `tensor`. A receiver
    that is also a holder already has the slice. Any other receiver takes it from a holder on its own machine
    if there is one; `hflow.planner.weights.resharding.senders` says from which.
    """

    tensor: str
    layers: tuple[int, int] | None
    """`[first, last)` of the layers that share the row; None for a tensor outside the layers."""
    box: tuple[tuple[int, int], ...]
    """`(start, stop)` on each axis of the checkpoint's tensor."""
    holders: int
    """Index in `WeightRoute.worker_sets`."""
    receivers: int
    """Index in `WeightRoute.worker_sets`."""


@dataclass(frozen=True)
class WeightRoute:
    """The way of weights from one replica to another replica of the same model."""

    model: str
    src: str
    dst: str
    how: Literal["shared", "gather", "pull"]
    """`shared`: both replicas use the same storage (one worker). `gather`: an all-gather, bucket by bucket,
    into the copy on the same workers, which may be in their own processes. `pull`: published, then pulled by
    other workers or processes."""
    worker_sets: tuple[tuple[int, ...], ...] = ()
    """Sets of workers, which rows refer to by index."""
    rows: tuple[RouteRow, ...] = ()
    """Empty if the model's sizes are unknown."""
    moved_bytes: int = 0
    """Bytes that all receivers together take from other workers: the minimum, given what each already
    holds."""
    node_bytes: int = 0
    """The part of `moved_bytes` that crosses machines."""
    held_bytes: int = 0
    """Bytes of the destination that its workers already hold."""
    transport: str = ""
    """The transport of a `pull` route: a name of `GenConfig.transport` other than `auto`."""
    why: str = ""
    """The reason for the transport."""
    delta: bool = False
    """Whether a `pull` route sends only what has changed since the last version."""
    saved_bytes: int = 0
    """How much larger `moved_bytes` were if the destination's ranks were in the order of its devices; 0 if
    they are."""
    near: str = ""
    """The transport from a worker to the engine on its own device, which is in a process of its own; empty:
    `transport`, as for all others, or nothing of a `gather` route in one process."""

    @property
    def hands_over(self) -> bool:
        """Return whether workers gather whole tensors, and hand them over to engines' processes."""
        return self.how == "gather" and bool(self.near)


def batch_replica(replicas: Iterable[Replica], model: str) -> Replica:
    """Return the replica of a model that batch nodes use."""
    return next(r for r in replicas if r.model == model and r.role != "gen")


def generation_replica(replicas: Iterable[Replica], model: str) -> Replica:
    """Return the replica of a model that generates."""
    return next(r for r in replicas if r.model == model and r.role == "gen")


SAVE_PREFIX = "save."
"""Prefix of the nodes that save models: the node `save.NAME` saves model NAME."""

PUBLISH_PREFIX = "publish."
"""Prefix of the events in which weights for a generation replica are published (`Schedule.publishers`)."""


@dataclass(frozen=True)
class ScheduledStream:
    """A root stream as the state machine sees it. Derived streams share the samples of their root."""

    name: str
    source: str
    group_size: int
    """Samples per group (G); the samples of group g have the ids `g * G ... g * G + G - 1`."""
    batch: int | None
    """Groups per batch; None for side streams (evaluation), which read their whole dataset."""
    replicas: tuple[str, ...]
    """Generation replicas that the source uses; empty when an encode node opens the stream."""
    models: tuple[str, ...]
    """Models whose weights the source reads."""
    min_group: int = 1
    """A group with fewer samples than this left is refused."""
    every: int = 1
    after: int = 0
    """A side stream is evaluated at versions v >= after with (v - after) % every == 0, and at the end."""


@dataclass(frozen=True)
class ScheduledNode:
    """A node other than a source, as the state machine sees it."""

    name: str
    level: Level
    """When it fires. A per-sample body that reads a batch node is scheduled at `batch`."""
    stream: str
    """Root stream."""
    needs: tuple[str, ...]
    """Nodes that must finish before it for the same sample, group or step (data and overwrite edges)."""
    groups: tuple[str, ...] = ()
    """For a batch node: the device groups in whose order it runs, all at the same time. For any other node:
    those on which it runs as samples and groups arrive, outside that order. Empty: it needs no device."""
    reads: tuple[str, ...] = ()
    """Models whose weights it reads exactly as they are at the start of the step (lag 1)."""
    writes: tuple[str, ...] = ()
    keep: bool = False
    """Whether it returns `keep`; False refuses the sample or group."""
    every: int = 1
    after: int = 0
    """Batch nodes fire at steps k >= after with (k - after) % every == 0."""
    at_end: bool = False
    """Whether it also fires at the last step, whatever `every` says (saving)."""

    @property
    def saves(self) -> bool:
        """Whether it saves a model."""
        return self.name.startswith(SAVE_PREFIX)


@dataclass(frozen=True)
class Schedule:
    """All that the state machine, `RunState`, knows of a plan."""

    streams: tuple[ScheduledStream, ...]
    """The trained stream (with a batch) first, then side streams. A recipe that learns nothing has only
    side streams."""
    nodes: tuple[ScheduledNode, ...]
    orders: tuple[tuple[str, tuple[str, ...]], ...]
    """Device group -> its batch nodes in cyclic order. All orders are parts of one order, so that groups with
    common nodes cannot wait for each other."""
    shared: tuple[tuple[str, tuple[str, ...]], ...]
    """Device group -> generation replicas that share devices with batch nodes, in this group or in another
    of theirs: each cycle of these groups starts with their turn."""
    num_steps: int
    """0 where nothing is learned: every stream is evaluated once."""
    publishers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Generation replica whose weights change and that shares no group with batch nodes -> the groups that
    train and publish these weights."""
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
    """Train node -> how it cuts its batch."""
    weights: tuple[WeightRoute, ...]
    schedule: Schedule
    shapes: tuple[tuple[str, ModelShape], ...]
    """Model -> its sizes, if the planner knows its family."""
    settings: tuple[tuple[str, Any], ...]
    """Configuration that changes results (models, optimizers, data, seed), flattened and sorted."""
    staleness_bound: int | None
    """Largest version lag that a trained token can have; None if no rule bounds it."""
    deterministic: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    """Whether two runs of the plan must be equal bit for bit (`hflow.planner.models.choices`)."""
    warnings: tuple[str, ...] = ()
    engines: tuple[EngineChoice, ...] = ()
    """Engines with the reasons for them. Not part of the digest, as replicas name their engines, and no
    result depends on the size of a cache."""
    attention: tuple[AttentionChoice, ...] = ()
    """Attention kernels with the reasons for them. Not part of the digest: they change rounding only."""
    layers: tuple[LayerChoice, ...] = ()
    """Kernels of layers, where there is a choice, with the reasons for them. Not part of the digest, as
    `attention`."""
    unrunnable: tuple[str, ...] = ()
    """Reasons why the plan cannot run, each with a fix; empty if nothing in the plan prevents it. Not part of
    the digest."""
    hardware: Hardware = field(kw_only=True)
    """Figures that the forecast uses. Not part of the digest, as no decision of a run depends on them."""
    forecast: Forecast = field(default_factory=Forecast)
    """Estimates of bytes and seconds; empty until they are made. Not part of the digest."""
    digest: str = ""

    def replica(self, name: str) -> Replica:
        """Return the replica of that name."""
        return next(r for r in self.replicas if r.name == name)

    def placement(self, node: str) -> Placement:
        """Return the placement of a node."""
        return next(p for p in self.placements if p.node == node)

    def workers_of(self, node: str) -> set[int]:
        """Return the workers that run a node: its heads, and all ranks of its models that train or infer."""
        placement = self.placement(node)
        replicas = [self.replica(name) for name in placement.replicas]
        ranks = {worker for replica in replicas if replica.role != "gen" for worker in replica.workers}
        return {*placement.heads, *ranks}

    def rule(self, node: str) -> EdgeRule:
        """Return the redistribution rule of a node."""
        return next(r for r in self.rules if r.consumer == node)
