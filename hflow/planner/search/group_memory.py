"""`GroupMemory`: whether replicas that share devices fit into memory with some of their options.

The bytes are those of `memory_phases`. Where ranks of one replica differ, as those of pipeline stages do,
each replica counts with its fullest rank, as if all of these were on the same device. So nothing is accepted
here that does not fit; `check_memory` has the last word. Models of unknown sizes count as nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from hflow.base.devices import is_gpu
from hflow.planner.forecast.memory.host import kept_asleep, kept_by_engine, kept_by_trainer
from hflow.planner.forecast.memory.phases import (
    GENERATE,
    WAKE,
    EngineNeeds,
    MemoryContext,
    engine_needs,
    largest_batch,
    size_caches,
    state_bytes,
    transient_bytes,
)
from hflow.planner.forecast.memory.rank import Rank, stage_sizes
from hflow.planner.plan.channels import CHANNELS, GATHER, broadcast_channel, channel_traits, near_channel
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.rows import Plan, Replica, WeightRoute
from hflow.planner.plan.schedule import share_of_unchanged_wakes
from hflow.planner.plan.traits import traits
from hflow.planner.search.memo import memo
from hflow.planner.search.problem import SearchProblem
from hflow.planner.search.replica_option import ReplicaOption
from hflow.planner.weights.weight_routes import near_transport, way_of
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import DTYPE_BYTES, num_parameters


@dataclass(frozen=True)
class Fit:
    """The memory of a group's fullest device."""

    total: int
    """Bytes in the phase that needs most."""
    phase: str
    largest_batches: Mapping[str, int]
    """Engine -> sequences of mean length that its cache holds, where the cache does not grow as needed."""
    host: int = 0
    """Bytes that the replicas keep in the memory of the device's host, without published weights."""


CommonDevices = Literal["all", "some", "none"]
"""How many of its trainer's devices an engine has: all and no others, some, or none."""

NODE = ""
"""Any phase in which engines sleep and the replica does not run. No node has this name."""

Phases = tuple[tuple[str, frozenset[str]], ...]
"""The phases of a group's step, each with the replicas that have inferred since they trained."""


class _Common(NamedTuple):
    """What the memory of one side of a transfer of weights depends on."""

    devices: CommonDevices
    """How many devices an engine and its trainer have in common."""
    how: Literal["shared", "gather", "pull"] | None = None
    """The way of weights between them; None where only one side is known."""


@dataclass(frozen=True)
class _Profile:
    """The bytes that a replica adds to a device, without its cache."""

    held: Mapping[tuple[str, bool], int]
    """(`generate`, `wake` or `NODE`; whether it inferred since training) -> bytes in phases of others."""
    running: Mapping[tuple[str, bool], int]
    """(phase in which it runs; whether it inferred since training) -> bytes, with the peak of the phase."""
    engine: EngineNeeds | None
    """The needs of a generation replica's fullest rank; None for other replicas."""
    host: int = 0
    """Bytes in host memory at all times: `kept_by_trainer` or `kept_by_engine`."""
    asleep: int = 0
    """Bytes in host memory of an engine that sleeps."""


@dataclass(frozen=True)
class _PhaseBytes:
    """The bytes that a replica adds to a device in the phases of one group."""

    phases: tuple[int, ...]
    """Bytes in each phase, without caches and the steps of engines."""
    generating: int
    """Bytes while engines generate; 0 in a group without engines."""
    smallest: tuple[int, ...]
    """Bytes in each phase, with the step and the smallest cache of an engine; without phases these alone."""


class GroupMemory:
    """The memory of groups of replicas for any of their options."""

    def __init__(self, problem: SearchProblem) -> None:
        self._problem = problem
        self._plan = problem.base
        self._contexts: dict[tuple[str, _Common, bool], MemoryContext] = {}
        self._kept = sum(node.spec.memory for node in self._plan.graph.nodes)
        self._held_by_layout: dict[Hashable, dict[tuple[str, bool], int]] = {}
        self._on_host_by_layout: dict[Hashable, tuple[int, int]] = {}
        self._returned_by_layout: dict[Hashable, int] = {}
        self._collectives_by_layout: dict[Hashable, int] = {}
        self._peaks: dict[Hashable, int] = {}
        self._latest_ranks: dict[Replica, list[Rank]] = {}
        """Replica -> what its last option made, which has kept what depends on no setting."""
        self._nodes_of: dict[str, list[str]] = {}
        for placement in self._plan.placements:
            used = [*placement.replicas, *(self._plan.replica(name).base_of for name in placement.replicas)]
            for name in dict.fromkeys(used):
                self._nodes_of.setdefault(name, []).append(placement.node)

    def runtime(self, device: int) -> int:
        """Return the bytes that the runtime of a device, and nodes, take there."""
        return round(self._problem.request.hardware.at(device).device.overhead_gib * GIB) + self._kept

    def sizes(
        self, phases: Phases, option: ReplicaOption, common: Mapping[str, CommonDevices]
    ) -> tuple[int, ...]:
        """Return the bytes that an option adds in each phase, without its cache, and for engines their speed.

        An option is of no use beside one that is at least as fast and as small everywhere. More sequences
        at once may not fit beside other replicas, so a different `max_running` counts as a different size.
        """
        return self._bytes_in(phases, option, _Common(common.get(option.replica.model, "all"))).smallest

    def needs(self, option: ReplicaOption) -> tuple[int, int]:
        """Return the memory of a replica, in per cent, while others run and at the peak of its own nodes."""
        profile, device = self._profile(option, _Common("all")), option.replica.workers[0]
        needs = profile.held[NODE, True], max(profile.running.values(), default=0)
        held, peak = (100 * num_bytes // self._problem.cluster.memory_of(device) for num_bytes in needs)
        return held, peak

    def fit(
        self, phases: Phases, options: Sequence[ReplicaOption], common: Mapping[str, CommonDevices]
    ) -> Fit:
        """Return the memory of a device with one option of each replica of a group.

        `common` is how many devices a model's engine and trainer have in common.
        """
        found = [self._common(option, options, common) for option in options]
        rows = [self._bytes_in(phases, *pair) for pair in zip(options, found, strict=True)]
        cluster, device = self._problem.cluster, options[0].replica.workers[0]
        capacity, on_cpu = cluster.memory_of(device), cluster.device == "cpu"
        profiles = [self._profile(*pair) for pair in zip(options, found, strict=True)]
        engines = [profile.engine for profile in profiles if profile.engine is not None]
        runtime = self.runtime(device) - self._shared(options)
        used = runtime + sum(row.generating for row in rows)
        shares = any(phase not in (GENERATE, WAKE) for phase, _ in phases)
        sizes = size_caches(engines, capacity, used, {}, loads_beside=not shares)
        caches = sum(sizes.values())
        used += sum(engine.step for engine in engines) + caches
        batches = {}
        for engine in engines:
            name = engine.rank.replica.name
            batch = largest_batch(self._plan, engine.rank, sizes[name], self._problem.workloads)
            if batch is not None:
                batches[name] = batch
        largest, fullest = self.runtime(device), ""
        base = runtime + (caches if on_cpu or not shares else 0)
        sums = [sum(column) for column in zip(*(row.phases for row in rows), strict=True)]
        for (phase, _), num_bytes in zip(phases, sums, strict=True):
            total = used if phase == GENERATE else base + num_bytes
            if total > largest:
                largest, fullest = total, phase
        host = sum(profile.host + (profile.asleep if shares else 0) for profile in profiles)
        return Fit(largest, fullest, batches, host)

    def _common(
        self, option: ReplicaOption, options: Sequence[ReplicaOption], common: Mapping[str, CommonDevices]
    ) -> _Common:
        """Compare an option with the other side of its model among a group's options."""
        model = option.replica.model
        devices = common.get(model, "all")
        mine = [other for other in options if other.replica.model == model]
        engine = next((other for other in mine if other.replica.role == "gen"), None)
        source = next((other for other in mine if other.replica.role != "gen"), None)
        if devices != "all" or engine is None or source is None:
            return _Common(devices)
        return _Common(devices, self._way(source, engine))

    @memo
    def _way(self, source: ReplicaOption, engine: ReplicaOption) -> Literal["shared", "gather", "pull"]:
        """Return the way of weights from a trainer to an engine on the same devices."""
        trainer, served = (replace(one.replica, workers=(0,)) for one in (source, engine))
        return way_of(trainer, served, engine.config, self._problem.request)

    def _shared(self, options: Sequence[ReplicaOption]) -> int:
        """Return the bytes of communicators that options of a group share, and that each of them counts."""
        counted: dict[tuple[str, Layout], list[int]] = {}
        for option in options:
            key = option.replica.backend, option.layout
            counted.setdefault(key, []).append(self._smallest_collectives(option))
        return sum(sum(several) - max(several) for several in counted.values())

    def most_shared(self, options: Iterable[Sequence[ReplicaOption]]) -> int:
        """Return a bound on `_shared`, for any of the options of each replica of a group."""
        most = [max(map(self._smallest_collectives, several), default=0) for several in options]
        return sum(most) - max(most, default=0)

    def _smallest_collectives(self, option: ReplicaOption) -> int:
        """Return the bytes of the communicators of a training replica on the rank with the fewest; else 0."""
        if option.replica.role == "gen" or option.replica.model not in self._problem.request.shapes:
            return 0
        key = option.name, option.layout, self._problem.cluster.part_index(option.replica.workers[0])
        if key not in self._collectives_by_layout:
            context = MemoryContext(self._plan, self._problem.request)
            self._collectives_by_layout[key] = min(map(context.bytes_of_collectives, self._ranks(option)))
        return self._collectives_by_layout[key]

    @memo
    def _bytes_in(self, phases: Phases, option: ReplicaOption, common: _Common) -> _PhaseBytes:
        profile = self._profile(option, common)
        rows: list[int] = []
        generating = added = 0
        if (engine := profile.engine) is not None:
            added = engine.step + engine.memory.cache_bytes(engine.rank, engine.load, 0, 0)
        for phase, inferred in phases:
            key = option.name in inferred
            running = profile.running.get((phase, key))
            kind = phase if phase in (GENERATE, WAKE) else NODE
            rows.append(profile.held[kind, key] if running is None else running)
            if phase == GENERATE:
                generating = rows[-1]
        smallest = [
            row + (added if phase == GENERATE else 0) for row, (phase, _) in zip(rows, phases, strict=True)
        ]
        return _PhaseBytes(tuple(rows), generating, tuple(smallest or [added]))

    @memo
    def _profile(self, option: ReplicaOption, common: _Common) -> _Profile:
        if option.replica.model not in self._problem.request.shapes:
            kinds = {(kind, inferred): 0 for kind in (GENERATE, WAKE, NODE) for inferred in (False, True)}
            return _Profile(kinds, {}, None)
        context = self._context(option, common)
        held: dict[tuple[str, bool], int] = {}
        running: dict[tuple[str, bool], int] = {}
        engine, host, asleep = None, 0, 0
        for rank in self._ranks(option):
            always, sleeping = self._on_host(context, rank, option, common)
            host, asleep = max(host, always), max(asleep, sleeping)
            before = self._held(context, rank, option, common)
            for key, total in before.items():
                held[key] = max(held.get(key, 0), total)
            for node in self._nodes_of.get(option.name, ()):
                peak = self._peak(context, rank, node, common)
                if option.config.offload != "none":
                    peak += self._returned(context, rank, node, option, common)
                for inferred in (False, True):
                    total = before[NODE, inferred] + peak
                    running[node, inferred] = max(running.get((node, inferred), 0), total)
            if option.replica.role == "gen" and rank.stage == 0:
                engine = engine_needs(context, rank, self._problem.workloads)
        return _Profile(held, running, engine, host, asleep)

    def _on_host(
        self, context: MemoryContext, rank: Rank, option: ReplicaOption, common: _Common
    ) -> tuple[int, int]:
        """Return a rank's bytes in host memory at all times, and its further ones while it sleeps."""
        config = option.config
        batches = config.tokens_per_microbatch, config.activation_checkpointing
        key = (
            *(option.name, option.layout, config.offload, rank.stage, common),
            batches if config.offload_activations else None,
        )
        if key not in self._on_host_by_layout:
            asleep = 0
            if option.replica.role == "gen":
                through_host = replace(context, plan=_sent_through_hosts(context.plan))
                always = kept_by_engine(through_host, rank).total()
                schedule, model = self._plan.schedule, option.replica.model
                is_written = any(model in node.writes for node in schedule.nodes)
                is_trained = common.devices != "none" and is_written
                if share_of_unchanged_wakes(schedule, option.name, trains_on_its_devices=is_trained):
                    asleep = kept_asleep(context, rank).total()
            else:
                always = kept_by_trainer(context, rank).total()
            self._on_host_by_layout[key] = always, asleep
        return self._on_host_by_layout[key]

    def _returned(
        self, context: MemoryContext, rank: Rank, node: str, option: ReplicaOption, common: _Common
    ) -> int:
        """Return the offloaded bytes of a rank that are on the device while a node runs."""
        key = node, option.name, option.layout, option.config.offload, rank.stage, common
        if key not in self._returned_by_layout:
            idle, used = (state_bytes(context, rank, phase, ()) for phase in (NODE, node))
            self._returned_by_layout[key] = used - idle
        return self._returned_by_layout[key]

    def _peak(self, context: MemoryContext, rank: Rank, node: str, common: _Common) -> int:
        """Return the bytes of a node's peak, which does not depend on what is offloaded."""
        config, verb = rank.config, context.verb(node)
        tokens = config.tokens_per_microbatch if verb in ("infer", "train") else None
        backward = (config.activation_checkpointing, config.zero_stage) if verb == "train" else None
        key = node, rank.replica, tokens, backward, rank.stage, common
        if key not in self._peaks:
            self._peaks[key] = transient_bytes(context, rank, node)
        return self._peaks[key]

    def _context(self, option: ReplicaOption, common: _Common) -> MemoryContext:
        """Return the plan and the request on which the memory of an option's ranks depends."""
        key = option.name, common, option.layout.world == 1
        if key not in self._contexts:
            settings = replace(self._problem.request.schedule, max_concurrent=self._problem.in_flight)
            schedule = replace(self._plan.schedule, settings=settings)
            plan = replace(self._plan, weights=self._routes(option, common), schedule=schedule)
            self._contexts[key] = MemoryContext(plan, self._problem.request)
        return self._contexts[key]

    def _ranks(self, option: ReplicaOption) -> list[Rank]:
        """Return the ranks among which the fullest is: of the first, the last and the largest stage.

        The largest is another one where the first layers have no experts.
        """
        known = self._latest_ranks.get(option.replica)
        if known is None:
            shape = self._problem.request.shapes[option.replica.model]
            on_cpu = self._problem.cluster.device == "cpu"
            stages = {0, option.layout.pipe - 1, self._largest_stage(option.name, option.layout)}
            ranks = [
                Rank(option.replica, shape, option.config, stage, stage == 0, on_cpu)
                for stage in sorted(stages)
            ]
        else:
            ranks = [rank.with_config(option.config) for rank in known]
        self._latest_ranks[option.replica] = ranks
        return ranks

    @memo
    def _largest_stage(self, name: str, layout: Layout) -> int:
        """Return the stage with most weights; 0 where all layers are equal."""
        shape, own = self._problem.request.shapes[self._plan.replica(name).model], self._problem.traits(name)
        stages = range(layout.pipe if shape.experts else 1)
        return max(stages, key=lambda stage: stage_sizes(shape, own, layout, stage).total)

    def _held(
        self, context: MemoryContext, rank: Rank, option: ReplicaOption, common: _Common
    ) -> dict[tuple[str, bool], int]:
        """Return a rank's bytes in phases in which it does not run.

        No size of micro-batches plays a role in this, so options that differ in nothing else share it.
        """
        config = option.config
        part = self._problem.cluster.part_index(option.replica.workers[0])
        key = (option.name, option.layout, part, config.gen.max_running, config.offload, rank.stage, common)
        if key not in self._held_by_layout:
            runtime = context.communicators((rank,)).total()
            idle, waking = (state_bytes(context, rank, kind, ()) for kind in (NODE, WAKE))
            waking += transient_bytes(context, rank, WAKE)
            generating, kept = idle, 0
            if option.replica.role == "gen":
                generating = state_bytes(context, rank, GENERATE, ())
            else:
                kept = state_bytes(context, rank, NODE, (option.name,)) - idle
            states = {GENERATE: generating, WAKE: waking, NODE: idle}
            held = {
                (kind, inferred): runtime + total + inferred * kept
                for kind, total in states.items()
                for inferred in (False, True)
            }
            self._held_by_layout[key] = held
        return self._held_by_layout[key]

    def _routes(self, option: ReplicaOption, common: _Common) -> tuple[WeightRoute, ...]:
        """Return the route from or to an option's replica, as far as memory depends on it."""
        model = option.replica.model
        mine = [replica for replica in self._plan.replicas if replica.model == model]
        engine = next((replica for replica in mine if replica.role == "gen"), None)
        source = next((replica for replica in mine if replica.role != "gen"), None)
        if engine is None or source is None or model not in self._problem.written:
            return ()
        device = self._problem.cluster.device
        source, engine = (replace(one, layout=option.layout, workers=(0,)) for one in (source, engine))
        engine = engine if common.devices == "all" else replace(engine, workers=(1,))
        how = common.how or way_of(source, engine, option.config, self._problem.request)
        route = WeightRoute(model, source.name, engine.name, how)
        if how == "pull":
            usual = near_channel(device)
            if is_gpu(device) and common.devices != "all":
                usual = CHANNELS.default if common.devices == "some" else broadcast_channel()
            configured = option.config.gen.transport
            has_held = common.devices != "none" and option.replica.role != "gen"
            route = replace(
                route,
                transport=usual if configured in ("auto", GATHER) else configured,
                held_bytes=_held_bytes(option, self._problem) if has_held else 0,
                delta=option.config.gen.delta,
            )
        return (replace(route, near=near_transport(route, engine, self._problem.request)),)


def _sent_through_hosts(plan: Plan) -> Plan:
    """Return a plan whose weights go through host memory if engines share devices with their trainer.

    Which layouts need that is known for pairs of them only.
    """
    routes = (
        replace(r, transport=CHANNELS.default) if channel_traits(r.transport).needs_one_device else r
        for r in plan.weights
    )
    return replace(plan, weights=tuple(routes))


def _held_bytes(trainer: ReplicaOption, problem: SearchProblem) -> int:
    """Return the most bytes of a trainer's rank that the engine on its device may need."""
    layout, shape = trainer.layout, problem.request.trained_shape(trainer.replica.model)
    assert shape is not None
    is_sharded = traits(trainer.replica.backend).shards_weights
    num_parts = layout.fsdp_size if is_sharded else layout.tensor * layout.pipe * layout.expert
    return DTYPE_BYTES[trainer.config.compute_dtype] * num_parameters(shape) // num_parts
