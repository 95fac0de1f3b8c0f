"""The phases of each device group, and the items that its devices hold in each of them.

`MemoryContext` is a plan with its request, and knows the ranks on each device.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hflow.graph.ir import Level
from hflow.graph.queries import root_stream
from hflow.planner.forecast.communicators import weight_communicators
from hflow.planner.forecast.memory import transfer
from hflow.planner.forecast.memory.nccl import NcclLinks, communicator_bytes, nccl_links, training_bytes
from hflow.planner.forecast.memory.offload import Use, in_host_memory, on_device
from hflow.planner.forecast.memory.parts import (
    EngineLoad,
    ItemKey,
    Items,
    MicroBatch,
    engine_load,
    engine_weights,
    item,
    largest_microbatch,
)
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.models.descriptors import EngineMemory, engine_kind, training_backend
from hflow.planner.plan.forecast import MemoryCategory, MemoryItem, PhaseMemory
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.request import PlanRequest, stream_workloads
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import SAVE_PREFIX, DeviceGroup, Plan, Replica, WeightRoute
from hflow.planner.plan.traits import traits
from hflow.planner.plan.workload import Workload, expected_max
from hflow.planner.weights.sharding import num_slices
from hflow.shapes.layout import Layout

Ranks = tuple[Rank, ...]
"""The ranks on one device, in the plan's order of replicas."""


@dataclass(frozen=True)
class MemoryContext:
    """The plan and the request that the memory of devices depends on."""

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
        """Return an engine's weight route, or None where its weights never change."""
        return next((route for route in self.plan.weights if route.dst == rank.replica.name), None)

    def keeps_cache(self, rank: Rank) -> bool:
        """Return whether an engine keeps its cache while it loads new weights: on devices of its own."""
        return any(name == rank.replica.name for name, _ in self.plan.schedule.publishers)

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
        batch = largest_microbatch(
            *(self.plan, graph_node, workload, rank.config, rank.data),
            shares_prompts=rank.traits.shares_prompts,
        )
        return batch.divided(rank.replica.layout.context)

    def verb(self, node: str) -> str:
        """Return the verb of a batch node; that of a node that saves a model is `save`."""
        return "save" if node.startswith(SAVE_PREFIX) else self.plan.graph.node(node).spec.verb

    def nccl_links(self, replica: Replica) -> NcclLinks | None:
        """Return the links that the memory of a replica's communicators depends on; None on CPUs."""
        hardware = self.request.hardware.at(replica.workers[0])
        return nccl_links(hardware, self.request.cluster.devices_per_node)

    @cached_property
    def _bytes_of_broadcasts(self) -> Mapping[str, int]:
        """Replica -> bytes of the communicators for its weights, on its worker with the most.

        A route without rows is one of a search, which does not know the other end: a trainer is taken to have
        two communicators, and an engine three.
        """
        found: dict[str, int] = {}
        for route in self.plan.weights:
            ends = {name: self.nccl_links(self.plan.replica(name)) for name in (route.src, route.dst)}
            joined = {links: self._joined(route, links) for links in ends.values() if links is not None}
            for (name, links), num in zip(ends.items(), (2, 3), strict=True):
                if links is None or not joined[links]:
                    continue
                if route.rows:
                    most = max(joined[links].get(worker, 0) for worker in self.plan.replica(name).workers)
                else:
                    most = num * communicator_bytes(range(2), links, broadcasts=True)
                found[name] = found.get(name, 0) + most
        return found

    def _joined(self, route: WeightRoute, links: NcclLinks) -> dict[int, int]:
        """Return the bytes of the communicators of a route on each of its workers, if all had some links."""
        joined: dict[int, int] = {}
        for one in weight_communicators(self.plan, route):
            num_bytes = communicator_bytes(one.workers, links, broadcasts=True)
            for worker in one.workers:
                joined[worker] = joined.get(worker, 0) + num_bytes
        return joined

    def communicators(self, ranks: Iterable[Rank]) -> Items:
        """Return the memory of the NCCL communicators on a device with some ranks.

        Replicas with the same workers and layout share theirs, with the connections of all.
        """
        total, shared = 0, dict[tuple[str, Layout, tuple[int, ...]], int]()
        for rank in ranks:
            replica, layout = rank.replica, rank.replica.layout
            if (links := self.nccl_links(replica)) is None:
                return Items()
            total += self._bytes_of_broadcasts.get(replica.name, 0)
            if replica.role == "gen":
                if (size := layout.world // layout.data) > 1:
                    total += communicator_bytes(range(size), links)
            else:
                key = replica.backend, layout, replica.workers
                shared[key] = max(shared.get(key, 0), self.bytes_of_collectives(rank))
        return item(MemoryCategory.RUNTIME, total + sum(shared.values()), "communicators")

    def bytes_of_collectives(self, rank: Rank) -> int:
        """Return the memory of the communicators of a training replica's rank."""
        links = self.nccl_links(rank.replica)
        if links is None:
            return 0
        return training_bytes(
            *(rank.replica.layout, rank.traits, rank.shape, rank.stage, links),
            sends_matrices=rank.sends_matrices,
        )

    @cached_property
    def nodes_of_workers(self) -> dict[int, Items]:
        """Worker -> the items that its nodes keep there, as their node types state it."""
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


GENERATE, WAKE = "generate", "wake"
"""Phases in which engines are awake."""


def memory_phases(plan: Plan, request: PlanRequest) -> tuple[PhaseMemory, ...]:
    """Return the bytes on every device in every phase of its group's step; equal devices share a row.

    Models of unknown sizes are left out, and so are the nodes that run on them. All data ranks count as the
    first, although the last ones hold less where the number of rows does not divide.

    Raises:
        PlanError: when the assumed prompt leaves no room for a response.
    """
    context = MemoryContext(plan, request)
    return tuple(row for group in plan.groups for row in _group_rows(context, group))


def unknown_models(plan: Plan) -> tuple[str, ...]:
    """Return the models whose sizes the planner does not know, so that their memory is left out."""
    known = dict(plan.shapes)
    return tuple(dict.fromkeys(r.model for r in plan.replicas if r.model not in known))


def engine_caches(plan: Plan, request: PlanRequest) -> dict[str, tuple[int, int]]:
    """Return bytes and largest batch of the caches that do not grow, by generation replica.

    The largest batch is the number of sequences of mean length. The ranks of a replica have equal caches, so
    those of the fullest device count.
    """
    context = MemoryContext(plan, request)
    found: dict[str, tuple[int, int]] = {}
    for group in plan.groups:
        inferred = next((at for phase, at in _phases(context, group) if phase == GENERATE), frozenset())
        for ranks, (device, *_) in context.ranks_of_devices(group):
            caches = _caches(context, ranks, inferred, context.nodes_of_workers.get(device, Items()))
            for rank in ranks:
                name = rank.replica.name
                if name not in caches:
                    continue
                limit = largest_batch(plan, rank, caches[name], context.workloads)
                if limit is not None:
                    found[name] = min(found.get(name, (caches[name], limit)), (caches[name], limit))
    return found


def group_phases(context: MemoryContext, group: DeviceGroup) -> list[tuple[str, frozenset[str]]]:
    """Return each phase of a group's step, and the other replicas that have inferred since they trained."""
    return list(_phases(context, group))


def state_bytes(context: MemoryContext, rank: Rank, phase: str, inferred: Container[str]) -> int:
    """Return the bytes of one rank on a device before a phase, without KV caches and what its runtime takes.

    Args:
        phase: `generate`, `wake`, a node, or "" for any node that does not use the rank.
        inferred: replicas that have inferred since they trained.
    """
    return _resident_of_rank(context, rank, phase, inferred, {rank.replica.name: 0}).total()


def transient_bytes(context: MemoryContext, rank: Rank, phase: str) -> int:
    """Return the bytes of one rank at the peak of a phase, beyond those on the device before it."""
    return _transient(context, (rank,), phase, {rank.replica.name: 0}).total()


def _runtime(context: MemoryContext, ranks: Ranks) -> int:
    """Return the bytes that the runtime of a device with some ranks takes."""
    device = ranks[0].replica.workers[0] if ranks else 0
    return round(context.request.hardware.at(device).device.overhead_gib * GIB)


def _group_rows(context: MemoryContext, group: DeviceGroup) -> Iterator[PhaseMemory]:
    phases = list(_phases(context, group))
    generating = next((inferred for phase, inferred in phases if phase == GENERATE), frozenset())
    ranks_of_devices = []
    for ranks, devices in context.ranks_of_devices(group):
        kept = context.nodes_of_workers.get(devices[0], Items())
        ranks_of_devices.append((ranks, devices, kept, _caches(context, ranks, generating, kept)))
    for phase, inferred in phases:
        equal: dict[tuple[tuple[MemoryItem, ...], tuple[MemoryItem, ...]], list[int]] = {}
        for ranks, devices, kept, caches in ranks_of_devices:
            resident = _resident(context, ranks, phase, inferred, caches) + kept
            transient = _transient(context, ranks, phase, caches)
            equal.setdefault((_rows(resident), _rows(transient)), []).extend(devices)
        for (resident_rows, transient_rows), same in equal.items():
            yield PhaseMemory(group.name, tuple(sorted(same)), phase, resident_rows, transient_rows)


def _rows(items: Items) -> tuple[MemoryItem, ...]:
    return tuple(MemoryItem(key.name, num_bytes, key.category) for key, num_bytes in items.items())


def _phases(context: MemoryContext, group: DeviceGroup) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each phase of a group's step, and the other replicas that have inferred since they trained.

    The step is walked twice, as what its end leaves allocated is there when the next one begins.
    """
    names = _phase_names(context, group)
    inferred: frozenset[str] = frozenset()
    for is_second in (False, True):
        for phase in names:
            running = frozenset(_running_replica(context, phase))
            if is_second:
                yield phase, inferred - running
            if running and context.verb(phase) == "infer":
                inferred |= running
            elif running and context.verb(phase) == "train":
                inferred -= running


def _phase_names(context: MemoryContext, group: DeviceGroup) -> list[str]:
    plan, unknown = context.plan, unknown_models(context.plan)
    known = {r.name: r for r in plan.replicas if group.name in r.groups and r.model not in unknown}
    generates = any(replica.role == "gen" for replica in known.values())
    sends = any(route.src in known and route.how == "pull" for route in plan.weights)
    streaming = [n.name for n in plan.schedule.nodes if n.level is not Level.BATCH and group.name in n.groups]
    nodes = (*streaming, *dict(plan.schedule.orders).get(group.name, ()))
    return [
        *([GENERATE] if generates else []),
        *([WAKE] if generates or sends else []),
        *(node for node in nodes if all(name in known for name in _running_replica(context, node))),
    ]


def _running_replica(context: MemoryContext, phase: str) -> tuple[str, ...]:
    """Return the replica that a node runs on; none for compute nodes and the phases of engines."""
    return () if phase in (GENERATE, WAKE) else context.plan.placement(phase).replicas[:1]


def _caches(context: MemoryContext, ranks: Ranks, inferred: Container[str], kept: Items) -> dict[str, int]:
    """Return the bytes of the KV cache of each engine on a device where nodes keep some bytes.

    The plan may know that another device leaves less for the cache of a replica, which is equal on all of its
    devices.
    """
    plan = context.plan
    engines = [engine_needs(context, r, context.workloads) for r in ranks if r.replica.role == "gen"]
    used = _resident(context, ranks, GENERATE, inferred, {}).total() + kept.total()
    known = {engine.replica: engine.cache_bytes for engine in plan.engines}
    loads_beside = any(context.keeps_cache(engine.rank) for engine in engines)
    capacity = plan.cluster.memory_of(ranks[0].replica.workers[0]) if ranks else 0
    return size_caches(engines, capacity, used, known, loads_beside=loads_beside)


@dataclass(frozen=True)
class EngineNeeds:
    """The needs of one rank of an engine beside its weights."""

    rank: Rank
    load: EngineLoad
    step: int
    """Bytes of a decode step."""
    loading: int
    """Bytes of loading new weights."""

    @property
    def memory(self) -> EngineMemory:
        """The memory formulas of the engine."""
        return engine_kind(self.rank.replica.backend).memory


def engine_needs(context: MemoryContext, rank: Rank, workloads: dict[str, Workload]) -> EngineNeeds:
    """Return the load of an engine's rank, with the bytes that it needs for it beside weights and cache."""
    load = engine_load(context.plan, rank, workloads)
    step = engine_kind(rank.replica.backend).memory.decode_step(rank, load).total()
    return EngineNeeds(rank, load, step, _weight_transfer(context, rank).total())


def size_caches(
    engines: Iterable[EngineNeeds],
    capacity: int,
    used: int,
    limits: Mapping[str, int | None],
    *,
    loads_beside: bool,
) -> dict[str, int]:
    """Return the bytes of the KV cache of each engine on a device.

    Engines are sized one after the other, each by what all others, and its own step, leave free.

    Args:
        used: bytes that everything but caches and decode steps takes while engines generate.
        limits: engine -> most bytes of its cache; None: no limit.
        loads_beside: whether engines keep their caches while they load new weights.
    """
    caches: dict[str, int] = {}
    for engine in engines:
        used += max(engine.step, engine.loading) if loads_beside else engine.step
        cache = engine.memory.cache_bytes(engine.rank, engine.load, capacity, used)
        limit = limits.get(engine.rank.replica.name)
        cache = cache if limit is None else min(cache, limit)
        caches[engine.rank.replica.name] = cache
        used += cache
    return caches


def largest_batch(plan: Plan, rank: Rank, cache: int, workloads: Mapping[str, Workload]) -> int | None:
    """Return the sequences of the mean length of an engine's first stream that a cache holds.

    None if the cache grows as needed.
    """
    stream = next(stream for stream in plan.schedule.streams if rank.replica.name in stream.replicas)
    lengths = workloads[stream.name]
    memory = engine_kind(rank.replica.backend).memory
    return memory.max_sequences(rank, cache, lengths.prompt + expected_max(lengths, 1))


def _resident(
    context: MemoryContext, ranks: Ranks, phase: str, inferred: Container[str], caches: Mapping[str, int]
) -> Items:
    """Return the items on a device before a phase begins: `generate`, `wake` or a node.

    `inferred` has the replicas that have inferred since they trained, and `caches` the bytes of the KV cache
    of each engine, which a phase other than `generate` may hold.
    """
    items = Items()
    for rank in ranks:
        items += _resident_of_rank(context, rank, phase, inferred, caches)
    return items + item(MemoryCategory.RUNTIME, _runtime(context, ranks)) + context.communicators(ranks)


def _resident_of_rank(
    context: MemoryContext, rank: Rank, phase: str, inferred: Container[str], caches: Mapping[str, int]
) -> Items:
    name = rank.replica.name
    if rank.replica.role == "gen":
        state = _engine_state(context, rank, phase, caches)
        state += engine_kind(rank.replica.backend).memory.process_state(rank, _runtime(context, (rank,)))
        if (route := context.route_to(rank)) is not None:
            state += transfer.received_weights(rank, route)
    else:
        memory, use = training_backend(rank.replica.backend).memory, _use(context, rank, phase)
        state = on_device(rank, memory.model_state(rank), use)
        if rank.on_cpu:
            state += in_host_memory(rank)
        if name in inferred and rank.config.offload != "all":
            state += memory.kept_after_infer(rank)
        routes = [(r, context.plan.replica(r.dst).layout.world) for r in context.routes_from(rank)]
        state += transfer.published_weights(rank, routes, is_loading=phase == WAKE)
    return Items({ItemKey(f"{name} {key.name}", key.category): size for key, size in state.items()})


def _use(context: MemoryContext, rank: Rank, phase: str) -> Use:
    """Return the part of a training or inference replica that a phase needs."""
    if phase == WAKE:
        return "weights" if context.routes_from(rank) else "nothing"
    placement = next((p for p in context.plan.placements if p.node == phase), None)
    if placement is None:
        return "nothing"
    if rank.replica.name in placement.replicas:
        return "everything" if context.verb(phase) in ("train", "save") else "weights"
    bases = (context.plan.replica(name).base_of for name in placement.replicas)
    return "weights" if rank.replica.name in bases else "nothing"


def _engine_state(context: MemoryContext, rank: Rank, phase: str, caches: Mapping[str, int]) -> Items:
    """Return an engine's weights, and its cache while it does not generate.

    A sleeping engine keeps both on a CPU. On an accelerator it frees them: it drops weights that the next
    wake replaces, and keeps others in the host's memory. On devices of its own it only pauses.
    """
    is_asleep = phase not in (GENERATE, WAKE)
    if is_asleep and not rank.on_cpu:
        return Items()
    suffix = " (asleep)" if is_asleep else ""
    items = Items()
    if not context.shares_weights(rank):
        items += item(MemoryCategory.WEIGHTS, engine_weights(rank), "weights" + suffix)
    if phase != GENERATE and (rank.on_cpu or context.keeps_cache(rank)):
        items += item(MemoryCategory.KV_CACHE, caches[rank.replica.name], "KV cache" + suffix)
    return items


def _transient(context: MemoryContext, ranks: Ranks, phase: str, caches: Mapping[str, int]) -> Items:
    """Return the items of a phase's peak on a device, beyond what is resident."""
    items = Items()
    for rank in ranks:
        if phase == GENERATE and rank.replica.role == "gen":
            items += _generation(context, rank, caches[rank.replica.name])
        elif phase == WAKE:
            items += _weight_transfer(context, rank)
        elif rank.replica.name in _running_replica(context, phase):
            items += _node(context, rank, phase)
    return items


def _generation(context: MemoryContext, rank: Rank, cache: int) -> Items:
    load = engine_load(context.plan, rank, context.workloads)
    step = engine_kind(rank.replica.backend).memory.decode_step(rank, load)
    return item(MemoryCategory.KV_CACHE, cache) + step


def _weight_transfer(context: MemoryContext, rank: Rank) -> Items:
    if rank.replica.role == "gen":
        route = context.route_to(rank)
        if route is None:
            return Items()
        source = context.plan.replica(route.src)
        is_gathered = route.how == "gather"
        num_parts = 1 if is_gathered else num_slices(traits(source.backend), source.layout)
        items = transfer.receive_weights(rank, route, num_parts)
        if rank.on_cpu or route.how == "shared":
            return items
        return items + engine_kind(rank.replica.backend).memory.layer_being_loaded(rank, num_parts)
    routes = context.routes_from(rank)
    return transfer.send_weights(rank, routes[0]) if routes else Items()


def _node(context: MemoryContext, rank: Rank, name: str) -> Items:
    verb = context.verb(name)
    if verb == "save":
        return transfer.save_checkpoint(rank)
    if verb not in ("infer", "train"):
        return Items()
    batch = context.largest_microbatch(rank, name)
    memory = training_backend(rank.replica.backend).memory
    return memory.train_step(rank, batch) if verb == "train" else memory.infer_step(rank, batch)
