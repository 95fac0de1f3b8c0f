"""`Evaluator`: the seconds of a step of any choice, from tables, without making a plan.

The seconds of nodes are those of `planner.forecast.cost`, and the period is that of
`planner.forecast.period`. Left out are the bytes that the inputs of nodes move between workers, which take
milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, count, permutations, product
from operator import getitem, le
from typing import Literal

from hflow.base.errors import PlanError
from hflow.config.schema import Offload
from hflow.planner.checks.unrunnable import unrunnable_reasons
from hflow.planner.forecast.cost.nodes import Costs, share_of_kept_weights
from hflow.planner.forecast.memory.host import published_by
from hflow.planner.forecast.memory.phases import MemoryContext, group_phases
from hflow.planner.make.replicas import Devices
from hflow.planner.plan.forecast import Pace
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import Replica, WeightRoute, joined_devices
from hflow.planner.plan.traits import traits
from hflow.planner.search.group_memory import CommonDevices, Fit, GroupMemory, Phases
from hflow.planner.search.layouts import comparable_devices
from hflow.planner.search.memo import memo
from hflow.planner.search.options import OptionTable
from hflow.planner.search.partition import Blocks, Partition, connected_blocks, publish
from hflow.planner.search.problem import SearchProblem
from hflow.planner.search.replica_option import ReplicaOption
from hflow.planner.search.route_bytes import with_bytes
from hflow.planner.weights.weight_routes import weight_route

Total = tuple[float, float]
"""Seconds of a step on the group of connected ones that takes longest, and of all of them together."""

Numbers = tuple[float, ...]

MAX_TRIES = 3000
"""Combinations of options that are tried for one group before it counts as too large for its devices."""


@dataclass(frozen=True, eq=False)
class GroupChoice:
    """An option for each replica of a group that fits together."""

    options: tuple[ReplicaOption, ...]
    fit: Fit
    seconds: Mapping[str, float]
    """Node -> seconds."""
    total: float
    """Seconds of everything on the group's devices in a step."""


@dataclass(frozen=True)
class NewWeights:
    """The cost of giving an engine new weights."""

    seconds: Mapping[str, float]
    """Event of loading or of publishing them -> its seconds, in the form that `steady_period` takes."""
    route: WeightRoute
    host_bytes: int
    """In the memory of the machine that holds most of published versions."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A whole plan, as far as the search decides it."""

    partition: Partition
    devices: tuple[Devices, ...]
    """The devices of each group of the partition."""
    groups: tuple[GroupChoice, ...]
    seconds: Mapping[str, float]
    """Event -> seconds, in the form that `steady_period` takes."""
    period: float
    cycle: tuple[str, ...]
    """The parts of the slowest cycle."""

    @property
    def options(self) -> tuple[ReplicaOption, ...]:
        """The option of each replica."""
        return tuple(dict.fromkeys(option for group in self.groups for option in group.options))

    @property
    def largest_batches(self) -> Mapping[str, int]:
        """Engine -> sequences of mean length that its cache holds, where it does not grow as needed."""
        largest: dict[str, int] = {}
        for group in self.groups:
            for name, number in group.fit.largest_batches.items():
                largest[name] = min(number, largest.get(name, number))
        return largest

    def devices_of(self, replica: str) -> Devices:
        """Return the devices of a replica's groups."""
        return joined_devices(_sets_of(replica, self.partition.blocks, self.devices))


class Evaluator:
    """Tables of options, memory and periods that all candidates of a search share."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.memory = GroupMemory(problem)
        self.table = OptionTable(problem, self.memory)
        self._groups: dict[
            tuple[Blocks, tuple[Devices, ...], tuple[int, ...]],
            tuple[float, tuple[GroupChoice, ...] | None],
        ] = {}
        """Groups -> their best options, or None if none take less than the seconds."""

    @memo
    def partition(self, blocks: Blocks) -> Partition:
        """Return the schedule of replicas that are divided like this."""
        return Partition(self.problem.structure(blocks), blocks)

    @memo
    def num_unrunnable(self, blocks: Blocks) -> int | None:
        """Return the number of reasons to refuse to run a division; None if it cannot even be planned."""
        try:
            return len(unrunnable_reasons(self.partition(blocks).plan, self.problem.request))
        except PlanError:
            return None

    @memo
    def phases(self, block: tuple[str, ...]) -> Phases:
        """Return the phases of a step on a group with exactly these replicas."""
        rest = tuple(r.name for r in self.problem.base.replicas if r.name not in block)
        plan = self.problem.structure([block, rest] if rest else [block])
        group = next(group for group in plan.groups if group.devices == (0,))
        return tuple(group_phases(MemoryContext(plan, self.problem.request), group))

    @memo
    def common_devices(self, blocks: Blocks) -> Mapping[str, CommonDevices]:
        """Compare the devices of each model's trainer with those of its engine, given connected blocks."""
        places = {
            r.name: {i for i, block in enumerate(blocks) if r.name in block}
            for r in self.problem.base.replicas
        }
        return {
            src.model: _compared(places[src.name], places[gen.name])
            for src, gen in permutations(self.problem.base.replicas, 2)
            if src.model == gen.model and gen.role == "gen" and src.role != "gen"
        }

    def options(
        self, name: str, blocks: Blocks, devices: Sequence[Devices], *, with_offload: bool = False
    ) -> tuple[ReplicaOption, ...]:
        """Return the options of a replica, as `OptionTable.options` does.

        Those of a replica in several groups use devices of each, unless the user has set its layout.

        Args:
            name: the replica's name.
            blocks: groups, with all of the replica's.
            devices: the devices of each group.
            with_offload: whether to add options with other values of `offload`.
        """
        options = self.table.options(name, self.costed(name, blocks, devices), with_offload=with_offload)
        if name in self.problem.layouts or (least := _least_ranks(_sets_of(name, blocks, devices))) == 1:
            return options
        return tuple(option for option in options if option.layout.world >= least)

    def fits_alone(self, name: str, devices: Devices) -> bool:
        """Return whether a replica has an option that fits on some devices without the bytes of others.

        It is alone, or beside all others, as engines on other devices receive weights in another way.
        """
        everyone = tuple(replica.name for replica in self.problem.base.replicas)
        return any(
            self._useful((block,), {name: (option,)})[name]
            for with_offload in (False, True)
            for option in self.table.options(name, devices, with_offload=with_offload)
            for block in ((name,), everyone)
        )

    def best_groups(
        self, blocks: Blocks, devices: Sequence[Devices], cutoff: float = math.inf
    ) -> list[GroupChoice] | None:
        """Return the fastest options of the replicas of each group, or None if in one of them none fit.

        Args:
            blocks: all groups.
            devices: the devices of each group.
            cutoff: None is also returned if the nodes of a group take so many seconds in any case.
        """
        fastest = {}
        for name in _names(blocks):
            table = self.options(name, blocks, devices)
            if not table:
                return None
            fastest[name] = table[0].total
        if any(sum(fastest[name] for name in block) >= cutoff for block in blocks):
            return None
        if self.partition(blocks).bound(self._least_seconds(blocks, devices)) >= cutoff:
            return None
        found: dict[int, GroupChoice] = {}
        for part in connected_blocks(blocks):
            connected, own = tuple(blocks[i] for i in part), tuple(devices[i] for i in part)
            costed = tuple(self.costed(name, connected, own) for name in _names(connected))
            key = connected, costed, tuple(map(len, own))
            longest, groups = self._groups.get(key, (0.0, None))
            if groups is None and longest < cutoff:
                groups = self._search_groups(connected, own, cutoff)
                self._groups[key] = cutoff, groups
            if groups is None:
                return None
            found |= zip(part, groups, strict=True)
        return [group for _, group in sorted(found.items())]

    def _least_seconds(self, blocks: Blocks, devices: Sequence[Devices]) -> dict[str, float]:
        """Return lower bounds of the seconds of nodes and of the source, whatever fits into memory."""
        seconds = dict(self.table.constant_seconds)
        for name in _names(blocks):
            seconds |= self.table.least_seconds(name, self.costed(name, blocks, devices))
        stream = self.problem.events.stream
        source = sum(seconds.pop(f"{name} source", 0.0) for name in stream.replicas)
        seconds[stream.source] = source + self.table.beside_engines(source)
        return seconds

    def groups(self, blocks: Blocks, options: Mapping[str, ReplicaOption]) -> tuple[GroupChoice, ...] | None:
        """Return options as the choice of each block, or None if they do not fit.

        Args:
            blocks: connected ones.
            options: replica -> its option.
        """
        if not self._agree(list(options.values())):
            return None
        common, found = self.common_devices(blocks), []
        for block in blocks:
            group = self._group(block, [options[name] for name in block], common)
            if group is None:
                return None
            found.append(group)
        return tuple(found)

    def replaced(self, choice: Choice, option: ReplicaOption) -> list[GroupChoice] | None:
        """Return the groups of a choice with another option of one replica, or None if it does not fit."""
        blocks = choice.partition.blocks
        part = next(p for p in connected_blocks(blocks) if any(option.name in blocks[i] for i in p))
        options = {o.name: o for i in part for o in choice.groups[i].options} | {option.name: option}
        changed = self.groups(tuple(blocks[i] for i in part), options)
        if changed is None:
            return None
        groups = dict(enumerate(choice.groups)) | dict(zip(part, changed, strict=True))
        return list(groups.values())

    def fullest(self, choice: Choice, option: ReplicaOption) -> Fit:
        """Return the memory of the fullest of a replica's groups, if a choice had another option of it."""
        blocks = choice.partition.blocks
        fits = []
        for block, group in zip(blocks, choice.groups, strict=True):
            if option.name in block:
                options = [option if o.name == option.name else o for o in group.options]
                fits.append(self.memory.fit(self.phases(block), options, self.common_devices(blocks)))
        return max(fits, key=lambda fit: fit.total)

    def _group(
        self, block: tuple[str, ...], options: Sequence[ReplicaOption], common: Mapping[str, CommonDevices]
    ) -> GroupChoice | None:
        if self._shares_offloaded(options):
            return None
        fit = self.memory.fit(self.phases(block), options, common)
        device = options[0].replica.workers[0]
        if fit.total > self.problem.memory_limit(device):
            return None
        if fit.host + self._published_within(options, common) > self.problem.host_memory_limit(device):
            return None
        limited = tuple(self.table.limited(o, fit.largest_batches.get(o.name)) for o in options)
        seconds = {name: value for option in limited for name, value in option.seconds.items()}
        return GroupChoice(tuple(options), fit, seconds, sum(option.total for option in limited))

    def choice(
        self, blocks: Blocks, devices: tuple[Devices, ...], groups: Sequence[GroupChoice], cutoff: float
    ) -> Choice | None:
        """Return a whole choice with its period, or None if this is not below a cutoff.

        Args:
            blocks: all groups.
            devices: the devices of each group.
            groups: the options of each group.
            cutoff: seconds of a step.
        """
        partition = self.partition(blocks)
        seconds = self.seconds(partition, devices, groups)
        if partition.bound(seconds) >= cutoff:
            return None
        period, cycle = partition.period(seconds)
        if period >= cutoff or not self._fits_hosts(blocks, devices, groups):
            return None
        return Choice(partition, devices, tuple(groups), seconds, period, cycle)

    def seconds(
        self, partition: Partition, devices: Sequence[Devices], groups: Sequence[GroupChoice]
    ) -> dict[str, float]:
        """Return the seconds of nodes, of the source, and of new weights."""
        seconds = dict(self.table.constant_seconds)
        option_of = {option.name: option for group in groups for option in group.options}
        for group in groups:  # an engine in several generates as fast as on the devices with the least room
            seconds |= {name: max(value, seconds.get(name, 0.0)) for name, value in group.seconds.items()}
        stream = self.problem.events.stream
        source = sum(seconds.pop(f"{name} source", 0.0) for name in stream.replicas)
        in_place = set()
        for gen, new in self._routed(partition.blocks, devices, tuple(option_of.values())):
            seconds |= new.seconds
            if new.route.how == "shared":
                in_place.add(gen.name)
        for name in stream.replicas:
            gen = option_of[name]
            if share := self._share_of_kept_weights(partition, name, name in in_place):
                source += share * self.table.waking(gen)
        seconds[stream.source] = source + self.table.beside_engines(source)
        return seconds

    @memo
    def _share_of_kept_weights(self, partition: Partition, engine: str, is_shared: bool) -> float:
        replica = partition.plan.replica(engine)
        config = self.problem.request.model(replica.model)  # a search changes nothing that this depends on
        return share_of_kept_weights(partition.plan.schedule, replica, config, is_shared=is_shared)

    def fixed_devices(self, block: tuple[str, ...]) -> Devices | None:
        """Return the devices of the named group that a block contains, or None if it contains none."""
        named = [group for group in self.problem.fixed if set(group.replicas) <= set(block)]
        return max(named, key=lambda group: len(group.replicas)).devices if named else None

    def costed(self, name: str, blocks: Blocks, devices: Sequence[Devices]) -> Devices:
        """Return the devices for which a replica is costed: free ones count like others on as many machines.

        Args:
            name: the replica's name.
            blocks: groups, with all of the replica's.
            devices: the devices of each group.
        """
        own = joined_devices(_sets_of(name, blocks, devices))
        if any(name in block and self.fixed_devices(block) is not None for block in blocks):
            return own
        return comparable_devices(own, self.problem.cluster)

    def pace(self, choice: Choice) -> Pace | None:
        """Return the pace of a choice's engines, or None without engines."""
        largest = choice.largest_batches
        return self.table.pace([(option, largest.get(option.name)) for option in choice.options])

    def in_flight(self, choice: Choice) -> int:
        """Return the samples that may be in flight at once.

        Where this is free, it is what engines hold with a group that waits for each of them, so that the next
        one goes to the engine with the least work. Staleness may allow fewer.
        """
        allowed, stream = self.problem.in_flight, self.problem.events.stream
        engines = [option for option in choice.options if option.name in stream.replicas]
        largest = choice.largest_batches
        is_free = bool(engines) and self.problem.is_free("schedule.max_concurrent")
        if not is_free or any(option.name not in largest for option in engines):
            return allowed
        size = stream.group_size
        held = sum(o.layout.data * (min(o.config.gen.max_running, largest[o.name]) + size) for o in engines)
        return min(allowed, -(-held // size) * size)

    def _routed(
        self, blocks: Blocks, devices: Sequence[Devices], options: Sequence[ReplicaOption]
    ) -> Iterator[tuple[ReplicaOption, NewWeights]]:
        """Yield each engine of a model that changes, with the cost of giving it new weights."""
        common = self.common_devices(blocks)
        for src, gen in _senders(options, self.problem.written):
            places = None
            # Otherwise devices differ in nothing but their number.
            if self.problem.cluster.parts or any(group.devices for group in self.problem.fixed):
                of_src, of_gen = (_sets_of(option.name, blocks, devices) for option in (src, gen))
                places = joined_devices(of_src), joined_devices(of_gen)
            yield gen, self._new_weights(src, gen, common[gen.replica.model], places)

    def _new_weights(
        self,
        src: ReplicaOption,
        gen: ReplicaOption,
        common: CommonDevices,
        places: tuple[Devices, Devices] | None = None,
    ) -> NewWeights:
        """Return the seconds, the route and the bytes of giving an engine new weights.

        Args:
            src: option of the trainer.
            gen: option of the engine.
            common: the number of devices that both have in common.
            places: the devices of both; None: any devices, in the same numbers.
        """
        state = src.config.offload, src.config.zero_stage
        return self._weights_between(src.replica, gen.replica, state, common, places)

    @memo
    def _weights_between(
        self,
        trainer: Replica,
        engine: Replica,
        state: tuple[Offload, Literal[1, 2, 3]],
        common: CommonDevices,
        places: tuple[Devices, Devices] | None,
    ) -> NewWeights:
        """Return the same of replicas with any options that have a trainer's `offload` and `zero_stage`."""
        problem = self.problem
        if places is not None:
            trainer, engine = (
                on_workers(replica, own[: replica.layout.world])
                for replica, own in zip((trainer, engine), places, strict=True)
            )
        elif common == "none":
            engine = _moved_behind(engine, trainer)
        config = replace(problem.request.model(engine.model), offload=state[0], zero_stage=state[1])
        request = replace(problem.request, models={**problem.request.models, engine.model: config})
        route = weight_route(trainer, engine, request, with_bytes)
        plan = replace(problem.base, cluster=problem.cluster, replicas=(trainer, engine), weights=(route,))
        stream = self.problem.events.stream.name
        costs = Costs(plan, request, problem.workloads[stream], ())
        loading, publishing = costs.weights(route), costs.publish_weights(route)
        seconds = {
            engine.name: sum(part.seconds for part in loading or ()),
            publish(engine.name): sum(part.seconds for part in publishing or ()),
        }
        sizes = [items.total() for _, items in published_by(plan, request, route)]
        return NewWeights(seconds, route, max(sizes, default=0))

    def _published_within(
        self, options: Sequence[ReplicaOption], common: Mapping[str, CommonDevices]
    ) -> float:
        """Return the bytes of published weights in host memory for each device of a group.

        They count for models whose engine has the devices of its trainer.
        """
        if not options or math.isinf(self.problem.host_memory_limit(options[0].replica.workers[0])):
            return 0.0
        per_machine = self.problem.cluster.devices_per_node
        num_devices = min(per_machine, max((option.layout.world for option in options), default=1))
        return sum(
            self._new_weights(src, gen, "all").host_bytes / num_devices
            for src, gen in _senders(options, self.problem.written)
            if common[gen.replica.model] == "all"
        )

    def _fits_hosts(self, blocks: Blocks, devices: Sequence[Devices], groups: Sequence[GroupChoice]) -> bool:
        """Return whether machines have room for weights published to engines on other devices.

        Nothing is counted machine by machine if each would have room for all of them.
        """
        problem, cluster = self.problem, self.problem.cluster
        room = problem.host_memory_limits
        options = tuple(dict.fromkeys(option for group in groups for option in group.options))
        common = self.common_devices(blocks)
        routes = [
            new for gen, new in self._routed(blocks, devices, options) if common[gen.replica.model] != "all"
        ]
        if math.isinf(min(room)) or not sum(new.host_bytes for new in routes):
            return True
        used: Counter[int] = Counter()
        for own, group in zip(devices, groups, strict=True):
            kept = group.fit.host + self._published_within(group.options, common)
            for machine, num in cluster.machines(own).items():
                used[machine] += round(kept * num)
        option_of = {option.name: option for option in options}
        for new in routes:
            replicas = tuple(
                on_workers(option_of[name].replica, own[: option_of[name].layout.world])
                for name in (new.route.src, new.route.dst)
                for own in (joined_devices(_sets_of(name, blocks, devices)),)
            )
            plan = replace(problem.base, cluster=cluster, replicas=replicas)
            for machine, items in published_by(plan, problem.request, new.route):
                used[machine] += items.total()
        return all(num_bytes <= room[machine] for machine, num_bytes in used.items())

    def _agree(self, options: Sequence[ReplicaOption]) -> bool:
        """Return whether replicas that need equal layouts have them."""
        for names in self.problem.tied:
            if len({option.layout for option in options if option.name in names}) > 1:
                return False
        return True

    def _shares_offloaded(self, options: Sequence[ReplicaOption]) -> bool:
        """Return whether an engine would use weights of its trainer in place that are offloaded."""
        return any(
            option.config.offload == "all"
            and option.replica.role == "train"
            and option.layout.world == 1
            and option.config.compute_dtype == "fp32"
            and any(
                other.replica.model == option.replica.model
                and other.replica.role == "gen"
                and other.layout.world == 1
                and not traits(other.replica.backend).has_own_process
                for other in options
            )
            for option in options
        )

    def _search_groups(
        self, blocks: Blocks, devices: Sequence[Devices], longest: float
    ) -> tuple[GroupChoice, ...] | None:
        """Return the fastest combination of options; offloading is tried where memory makes it slower.

        Args:
            blocks: connected ones.
            devices: the devices of each block.
            longest: combinations of which a block takes so many seconds are of no use.
        """
        tables = {name: self.options(name, blocks, devices) for name in _names(blocks)}
        fastest = {name: table[0] for name, table in tables.items()}
        first = self.groups(blocks, fastest)
        if first is not None and _seconds(first) <= _bound(blocks, fastest):
            return first
        most = {name: self._most(name, blocks, fastest, longest) for name in tables}
        tables = {n: tuple(o for o in table if o.total < most[n]) for n, table in tables.items()}
        found = self._fastest_fit(blocks, tables)
        # A faster combination of a group has no option that loses more than all options of this one together.
        loss = math.inf if found is None else _seconds(found)[1] - _bound(blocks, fastest)[1]
        wider = {}
        for name, table in tables.items():
            options = self.options(name, blocks, devices, with_offload=True)
            least = min(most[name], table[0].total + loss)
            wider[name] = tuple(option for option in options if option.total < least)
        if any(
            o.config.offload != self.problem.config(o.name).offload for row in wider.values() for o in row
        ):
            found = self._fastest_fit(blocks, wider) or found
        return found if found is not None and _seconds(found)[0] < longest else None

    def _most(self, name: str, blocks: Blocks, fastest: Mapping[str, ReplicaOption], longest: float) -> float:
        """Return the seconds from which on an option is of no use, whatever the other replicas have."""
        return min(
            longest - sum(fastest[other].total for other in block if other != name)
            for block in blocks
            if name in block
        )

    def _fastest_fit(
        self, blocks: Blocks, tables: Mapping[str, Sequence[ReplicaOption]]
    ) -> tuple[GroupChoice, ...] | None:
        """Try combinations of options in the order of their seconds, until one fits.

        Combinations are built replica by replica. One is given up if it does not fit even with the smallest
        options of the others. What an engine takes depends on the room that is left for its cache, so a
        combination that fits waits until no other one can be faster.
        """
        tables = self._useful(blocks, tables)
        axes = self._axes(tables)
        if not all(axes):
            return None
        limit = self._room(tables)
        sizes = [[self._flat_sizes(blocks, row) for row in axis] for axis in axes]
        totals = [[_totals(blocks, row) for row in axis] for axis in axes]
        least_sizes, least_totals = (
            [_sums(_minima(row) for row in rows[place:]) for place in range(1, len(rows))] + [None]
            for rows in (sizes, totals)
        )

        def bound(index: tuple[int, ...]) -> Total:
            seconds = _sums(_chosen(totals, index), least_totals[len(index) - 1])
            return max(seconds), sum(seconds)

        order = count()
        heap: list[tuple[Total, int, int, tuple[int, ...], tuple[GroupChoice, ...] | None]] = []
        heap.append((bound((0,)), 0, next(order), (0,), None))
        for _ in range(MAX_TRIES):
            if not heap:
                break
            _, _, _, index, found = heapq.heappop(heap)
            if found is not None:
                return found
            place = len(index) - 1
            after = [(*index[:-1], index[-1] + 1)] if index[-1] + 1 < len(axes[place]) else []
            if max(_sums(_chosen(sizes, index), least_sizes[place])) <= limit:
                if place + 1 < len(axes):
                    after.append((*index, 0))
                else:
                    choice = self.groups(blocks, {o.name: o for o in chain(*map(getitem, axes, index))})
                    if choice is not None:
                        heapq.heappush(heap, (_seconds(choice), -len(axes), next(order), index, choice))
            for other in after:
                heapq.heappush(heap, (bound(other), -len(other), next(order), other, None))
        return min((row[4] for row in heap if row[4] is not None), key=_seconds, default=None)

    def _axes(
        self, tables: Mapping[str, Sequence[ReplicaOption]]
    ) -> list[tuple[tuple[ReplicaOption, ...], ...]]:
        """Return the options of each replica, the fastest first, and together if layouts have to be equal."""
        tied = {name: tuple(n for n in tables if n in self._tied_to(name)) for name in tables}
        axes = []
        for names in dict.fromkeys(tied.values()):
            layouts = dict.fromkeys(option.layout for name in names for option in tables[name])
            rows = [
                row
                for layout in layouts
                for row in product(*([o for o in tables[name] if o.layout == layout] for name in names))
            ]
            axes.append(tuple(sorted(rows, key=lambda row: sum(option.total for option in row))))
        return axes

    def _tied_to(self, name: str) -> frozenset[str]:
        """Return the replicas that need the layout of one, itself included."""
        found = frozenset({name})
        while (more := found.union(*(names for names in self.problem.tied if names & found))) != found:
            found = more
        return found

    def _useful(
        self, blocks: Blocks, tables: Mapping[str, Sequence[ReplicaOption]]
    ) -> dict[str, tuple[ReplicaOption, ...]]:
        """Leave out options that do not fit beside the smallest of others, and those without any advantage.

        An earlier option is faster and nowhere larger than the latter. Where memory is tight, the former are
        nearly all, and they are the fastest.
        """
        limit, kept = self._room(tables), {}
        sizes = {name: [self._sizes(blocks, option) for option in table] for name, table in tables.items()}
        smallest = {
            name: {i: _minima(row[i] for row in rows) for i in rows[0]}
            for name, rows in sizes.items()
            if rows
        }
        needed = {
            i: _sums(smallest[name][i] for name in block if name in smallest)
            for i, block in enumerate(blocks)
        }
        for name, table in tables.items():
            useful: list[tuple[ReplicaOption, tuple[int, ...]]] = []
            most = tuple(
                limit - total + own
                for i, lows in smallest.get(name, {}).items()
                for total, own in zip(needed[i], lows, strict=True)
            )
            for option, by_block in zip(table, sizes[name], strict=True):
                flat = tuple(chain(*by_block.values()))
                if all(map(le, flat, most)) and not any(all(map(le, other, flat)) for _, other in useful):
                    useful.append((option, flat))
            kept[name] = tuple(option for option, _ in useful)
        return kept

    def _room(self, tables: Mapping[str, Sequence[ReplicaOption]]) -> int:
        """Return the most bytes that replicas with any of some options may have on a device."""
        device = next((option.replica.workers[0] for table in tables.values() for option in table), 0)
        limit = self.problem.memory_limit(device) - self.memory.runtime(device)
        return limit + self.memory.most_shared(tables.values())

    def _flat_sizes(self, blocks: Blocks, options: Sequence[ReplicaOption]) -> tuple[int, ...]:
        """Return the bytes of some options together in each phase of each block, one after the other."""
        common, flat = self.common_devices(blocks), list[int]()
        for block in blocks:
            phases = self.phases(block)
            own = [self.memory.sizes(phases, o, common) for o in options if o.name in block]
            flat += map(sum, zip(*own, strict=True)) if own else [0] * max(1, len(phases))
        return tuple(flat)

    def _sizes(self, blocks: Blocks, option: ReplicaOption) -> dict[int, tuple[int, ...]]:
        """Return an option's bytes in each phase of each of its replica's blocks, by their index."""
        common = self.common_devices(blocks)
        return {
            i: self.memory.sizes(self.phases(block), option, common)
            for i, block in enumerate(blocks)
            if option.name in block
        }


def _sets_of(replica: str, blocks: Blocks, devices: Sequence[Devices]) -> list[Devices]:
    """Return the devices of each of a replica's groups, given those of all groups."""
    return [own for own, block in zip(devices, blocks, strict=True) if replica in block]


def _least_ranks(sets: Sequence[Devices]) -> int:
    """Return the fewest ranks with which a replica uses a device of each of its groups."""
    if len(sets) == 1:
        return 1
    last = max(map(min, sets))
    return 1 + sum(device < last for device in chain(*sets))


def _names(blocks: Blocks) -> tuple[str, ...]:
    """Return the replicas of some groups."""
    return tuple(dict.fromkeys(chain(*blocks)))


def _compared(src: Set[int], gen: Set[int]) -> CommonDevices:
    """Compare the devices of a trainer and an engine, given the groups of each."""
    if src == gen:
        return "all"
    return "some" if src & gen else "none"


def _totals(blocks: Blocks, options: Sequence[ReplicaOption]) -> tuple[float, ...]:
    """Return the seconds that some options take in each block, without the limits of caches."""
    return tuple(sum(option.total for option in options if option.name in block) for block in blocks)


def _chosen(rows: Sequence[Sequence[Numbers]], index: Sequence[int]) -> list[Numbers]:
    """Return the row of each axis that has an index."""
    return [axis[i] for axis, i in zip(rows, index, strict=False)]


def _minima(rows: Iterable[Numbers]) -> Numbers:
    """Return the least of each column."""
    return tuple(map(min, zip(*rows, strict=True)))


def _sums(rows: Iterable[Numbers], added: Numbers | None = None) -> Numbers:
    """Return the sum of each column."""
    return tuple(map(sum, zip(*rows, *(() if added is None else (added,)), strict=True)))


def _bound(blocks: Blocks, options: Mapping[str, ReplicaOption]) -> Total:
    """Return the least that a combination of options takes, without the limits of caches."""
    totals = [sum(options[name].total for name in block) for block in blocks]
    return max(totals), sum(totals)


def _seconds(groups: Sequence[GroupChoice]) -> Total:
    """Return the seconds of connected groups."""
    return max(group.total for group in groups), sum(group.total for group in groups)


def _senders(
    options: Sequence[ReplicaOption], written: Container[str]
) -> Iterator[tuple[ReplicaOption, ReplicaOption]]:
    """Yield the options of each trainer and engine of a model that changes, if both are among the options."""
    for gen in options:
        model = gen.replica.model
        if gen.replica.role == "gen" and model in written:
            yield from ((o, gen) for o in options if o.replica.model == model and o.replica.role != "gen")


def _moved_behind(replica: Replica, other: Replica) -> Replica:
    """Return a replica on the devices that follow those of another."""
    first = other.workers[-1] + 1
    return on_workers(replica, tuple(range(first, first + replica.layout.world)))
