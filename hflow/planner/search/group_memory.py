"""`GroupMemory`: whether replicas that share devices fit into memory with some of their options.

The bytes are those of `memory_phases`. Where ranks of one replica differ, as those of pipeline stages do,
each replica counts with its fullest rank, as if all of these were on the same device. So nothing is accepted
here that does not fit; `check_memory` has the last word. Models of unknown sizes count as nothing.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hflow.planner.backends import engine_kind
from hflow.planner.hardware import GIB
from hflow.planner.ir import WeightRoute
from hflow.planner.memory.context import MemoryContext
from hflow.planner.memory.engine_load import EngineLoad, engine_load
from hflow.planner.memory.phases import GENERATE, WAKE, resident_bytes, transient_bytes
from hflow.planner.memory.rank import Rank
from hflow.planner.search.options import OptionTable, ReplicaOption
from hflow.planner.search.problem import SearchProblem
from hflow.planner.workload import Workload, expected_max


@dataclass(frozen=True)
class Fit:
    """The memory of a group's fullest device."""

    total: int
    """Bytes in the phase that needs most."""
    phase: str
    largest_batches: Mapping[str, int]
    """Engine -> sequences of mean length that its cache holds, where the cache does not grow as needed."""


NODE = "node"
"""Any phase in which engines sleep."""

Phases = Sequence[tuple[str, frozenset[str]]]
"""The phases of a group's step, each with the replicas that have inferred since they trained."""


@dataclass(frozen=True)
class _Profile:
    """What a replica adds to a device, without its cache."""

    held: Mapping[tuple[str, bool], int]
    """(`generate`, `wake` or `node`; whether it inferred since training) -> bytes in phases of others."""
    running: Mapping[tuple[str, bool], int]
    """The same for phases in which it runs, by their name, with the peak of the phase."""
    engine: tuple[Rank, EngineLoad, int] | None
    """Of a generation replica: its fullest rank, its load, and the bytes of a decode step."""


class GroupMemory:
    """The memory of groups of replicas for any of their options."""

    def __init__(self, problem: SearchProblem, table: OptionTable) -> None:
        self._problem = problem
        self._table = table
        self._plan = problem.base
        self._profiles: dict[tuple[ReplicaOption, bool], _Profile] = {}
        self.runtime = round(problem.hardware.device.overhead_gib * GIB)
        self._held_by_layout: dict[Hashable, dict[tuple[str, bool], int]] = {}
        self._nodes_of: dict[str, list[str]] = {}
        for placement in self._plan.placements:
            for name in placement.replicas[:1]:
                self._nodes_of.setdefault(name, []).append(placement.node)

    def sizes(self, phases: Phases, option: ReplicaOption, apart: Container[str]) -> tuple[int, ...]:
        """Return the bytes that an option adds in each phase, without its cache, and for engines their speed.

        An option is of no use beside one that is at least as fast and as small everywhere. More sequences
        at once may not fit beside other replicas, so a different `max_running` counts as a different size.
        """
        profile = self._profile(option, option.replica.model in apart)
        rows: list[int] = []
        for phase, inferred in phases:
            key = option.name in inferred
            running = profile.running.get((phase, key))
            kind = phase if phase in (GENERATE, WAKE) else NODE
            rows.append(profile.held[kind, key] if running is None else running)
        if profile.engine is not None:
            rank, load, step = profile.engine
            smallest = engine_kind(rank.replica.backend).memory.cache_bytes(rank, load, 0, 0)
            rows = [
                row + (step + smallest if phase == GENERATE else 0)
                for row, (phase, _) in zip(rows, phases, strict=True)
            ]
            if not phases:
                rows = [step + smallest]
        return tuple(rows)

    def fit(self, phases: Phases, options: Sequence[ReplicaOption], apart: Container[str]) -> Fit:
        """Return the memory of a device with one option of each replica of a group.

        Args:
            phases: those of the group.
            options: one for each replica.
            apart: models whose engines are in another group than their trainer.
        """
        profiles = [self._profile(option, option.replica.model in apart) for option in options]
        capacity, on_cpu = self._problem.cluster.memory_bytes, self._problem.cluster.device == "cpu"
        used, caches, batches = self.runtime, 0, {}
        for option, profile in zip(options, profiles, strict=True):
            used += profile.held[GENERATE, self._was_inferred(phases, option)]
        for option, profile in zip(options, profiles, strict=True):
            if profile.engine is None:
                continue
            rank, load, step = profile.engine
            memory = engine_kind(rank.replica.backend).memory
            used += step
            cache = memory.cache_bytes(rank, load, capacity, used)
            used, caches = used + cache, caches + cache
            batch = memory.max_sequences(rank, cache, self._mean_length(option.name))
            if batch is not None:
                batches[option.name] = batch
        largest, fullest = self.runtime, ""
        for phase, inferred in phases:
            total = used
            if phase != GENERATE:
                total = self.runtime + (caches if on_cpu else 0)
                kind = phase if phase == WAKE else NODE
                for option, profile in zip(options, profiles, strict=True):
                    key = option.name in inferred
                    running = profile.running.get((phase, key))
                    total += profile.held[kind, key] if running is None else running
            if total > largest:
                largest, fullest = total, phase
        return Fit(largest, fullest, batches)

    def _was_inferred(self, phases: Phases, option: ReplicaOption) -> bool:
        return any(option.name in inferred for phase, inferred in phases if phase == GENERATE)

    def _mean_length(self, replica: str) -> float:
        """Return the mean tokens of a sequence of the stream that an engine generates first."""
        streams = [s for s in self._plan.schedule.streams if replica in s.replicas]
        lengths: Workload = self._table.workloads[streams[0].name]
        return lengths.prompt + expected_max(lengths, 1)

    def _profile(self, option: ReplicaOption, is_apart: bool) -> _Profile:
        key = option, is_apart
        if key not in self._profiles:
            self._profiles[key] = self._make_profile(option, is_apart)
        return self._profiles[key]

    def _make_profile(self, option: ReplicaOption, is_apart: bool) -> _Profile:
        if option.replica.model not in self._problem.request.shapes:
            kinds = {(kind, inferred): 0 for kind in (GENERATE, WAKE, NODE) for inferred in (False, True)}
            return _Profile(kinds, {}, None)
        context = self._context(option, is_apart)
        held: dict[tuple[str, bool], int] = {}
        running: dict[tuple[str, bool], int] = {}
        engine = None
        for rank in self._ranks(option):
            before = self._held(context, rank, option, is_apart)
            for key, total in before.items():
                held[key] = max(held.get(key, 0), total)
            for node in self._nodes_of.get(option.name, ()):
                peak = transient_bytes(context, rank, node)
                for inferred in (False, True):
                    total = before[NODE, inferred] + peak
                    running[node, inferred] = max(running.get((node, inferred), 0), total)
            if option.replica.role == "gen" and rank.stage == 0:
                load = engine_load(context.plan, rank, self._table.workloads)
                memory = engine_kind(rank.replica.backend).memory
                engine = rank, load, memory.decode_step(rank, load).total()
        return _Profile(held, running, engine)

    def _context(self, option: ReplicaOption, is_apart: bool) -> MemoryContext:
        request = self._problem.request
        request = replace(
            request,
            models={**request.models, option.replica.model: option.config},
            schedule=replace(request.schedule, max_concurrent=self._table.in_flight),
        )
        schedule = replace(self._plan.schedule, settings=request.schedule)
        plan = replace(self._plan, weights=self._routes(option, is_apart), schedule=schedule)
        return MemoryContext(plan, request)

    def _ranks(self, option: ReplicaOption) -> list[Rank]:
        """Return the ranks among which the fullest is: those of the first and the last stage."""
        shape = self._problem.request.shapes[option.replica.model]
        on_cpu = self._problem.cluster.device == "cpu"
        stages = sorted({0, option.layout.pipe - 1})
        return [Rank(option.replica, shape, option.config, stage, stage == 0, on_cpu) for stage in stages]

    def _held(
        self, context: MemoryContext, rank: Rank, option: ReplicaOption, is_apart: bool
    ) -> dict[tuple[str, bool], int]:
        """Return what a rank holds in phases in which it does not run.

        No size of micro-batches plays a role in this, so options that differ in nothing else share it.
        """
        key = (option.name, option.layout, option.config.gen, rank.stage, is_apart)
        if key not in self._held_by_layout:
            held = {}
            for kind in (GENERATE, WAKE, NODE):
                held[kind, False] = resident_bytes(context, rank, kind, ())
            kept = resident_bytes(context, rank, NODE, (option.name,)) - held[NODE, False]
            held[WAKE, False] += transient_bytes(context, rank, WAKE)
            held |= {(kind, True): total + kept for (kind, _), total in held.items()}
            self._held_by_layout[key] = held
        return self._held_by_layout[key]

    def _routes(self, option: ReplicaOption, is_apart: bool) -> tuple[WeightRoute, ...]:
        """Return the route from or to an option's replica, as far as memory depends on it."""
        model = option.replica.model
        mine = [replica for replica in self._plan.replicas if replica.model == model]
        engine = next((replica for replica in mine if replica.role == "gen"), None)
        source = next((replica for replica in mine if replica.role != "gen"), None)
        if engine is None or source is None or model not in self._problem.written:
            return ()
        own_process = engine_kind(engine.backend).has_own_process
        if not is_apart and not own_process:
            how: Literal["shared", "gather"] = "shared" if option.layout.world == 1 else "gather"
            return (WeightRoute(model, source.name, engine.name, how),)
        usual = "shared"
        if self._problem.cluster.device == "cuda":
            usual = "collective" if is_apart else "ipc"
        configured = option.config.gen.transport
        transport = usual if configured == "auto" else configured
        return (WeightRoute(model, source.name, engine.name, "pull", transport=transport),)
