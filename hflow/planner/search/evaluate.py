"""`Evaluator`: the seconds of a step of any choice, from tables, without making a plan.

The seconds of nodes are those of `hflow.planner.cost`, and the period is that of `hflow.planner.period`. Left
out are the bytes that the inputs of nodes move between workers, which take milliseconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from hflow.planner.backends import engine_kind
from hflow.planner.cost.nodes import Costs
from hflow.planner.forecast import Pace
from hflow.planner.ir import Replica, WeightRoute
from hflow.planner.memory.context import MemoryContext
from hflow.planner.memory.host import published_by
from hflow.planner.memory.phases import group_phases
from hflow.planner.placement.replicas import Devices
from hflow.planner.routing import on_workers
from hflow.planner.search.devices import comparable_devices
from hflow.planner.search.group_memory import Fit, GroupMemory, Phases
from hflow.planner.search.options import OptionTable, ReplicaOption
from hflow.planner.search.partition import Blocks, Partition, publish
from hflow.planner.search.problem import SearchProblem, group_name
from hflow.planner.search.route_bytes import with_bytes
from hflow.planner.weights.weight_routes import weight_route

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
    """What it takes to give an engine new weights."""

    seconds: Mapping[str, float]
    """Of loading and of publishing them, as `steady_period` takes them."""
    route: WeightRoute
    host_bytes: int
    """In the memory of the machine that holds most of published versions."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A whole plan, as far as the search decides it."""

    partition: Partition
    devices: tuple[Devices, ...]
    """Of each group of the partition."""
    groups: tuple[GroupChoice, ...]
    seconds: Mapping[str, float]
    """As `steady_period` takes them."""
    period: float
    cycle: tuple[str, ...]
    """What the slowest cycle consists of."""

    @property
    def options(self) -> tuple[ReplicaOption, ...]:
        """The options of all replicas."""
        return tuple(option for group in self.groups for option in group.options)


class Evaluator:
    """Tables of options, memory and periods that all candidates of a search share."""

    def __init__(self, problem: SearchProblem) -> None:
        self.problem = problem
        self.table = OptionTable(problem)
        self.memory = GroupMemory(problem, self.table)
        self.num_periods = 0
        self._partitions: dict[Blocks, Partition] = {}
        self._phases: dict[tuple[str, ...], Phases] = {}
        self._groups: dict[tuple[tuple[str, ...], Devices], GroupChoice | None] = {}
        self._routes: dict[tuple[ReplicaOption, ReplicaOption, bool], NewWeights] = {}

    def partition(self, blocks: Blocks) -> Partition:
        """Return the schedule of replicas that are divided like this."""
        if blocks not in self._partitions:
            self._partitions[blocks] = Partition(self.problem.structure(blocks), blocks)
        return self._partitions[blocks]

    def phases(self, block: tuple[str, ...]) -> Phases:
        """Return the phases of a step on a group with exactly these replicas."""
        if block not in self._phases:
            rest = tuple(r.name for r in self.problem.base.replicas if r.name not in block)
            plan = self.problem.structure([block, rest] if rest else [block])
            group = next(group for group in plan.groups if group.name == group_name(block))
            self._phases[block] = tuple(group_phases(MemoryContext(plan, self.problem.request), group))
        return self._phases[block]

    def apart(self, block: Sequence[str]) -> frozenset[str]:
        """Return the models of which a block has one of two replicas."""
        models = {name: name.partition("@")[0] for name in block}
        return frozenset(
            model
            for model in models.values()
            if any(r.model == model and r.name not in models for r in self.problem.base.replicas)
        )

    def best_group(self, block: tuple[str, ...], devices: Devices) -> GroupChoice | None:
        """Return the fastest options of replicas that share devices and fit, or None if none fit."""
        key = block, devices
        if key not in self._groups:
            self._groups[key] = self._search_group(block, devices)
        return self._groups[key]

    def group(self, block: tuple[str, ...], options: Sequence[ReplicaOption]) -> GroupChoice | None:
        """Return these options of a block's replicas as one choice, or None if they do not fit."""
        if not self._agree(options) or self._shares_offloaded(options):
            return None
        fit = self.memory.fit(self.phases(block), options, self.apart(block))
        if fit.total > self.problem.memory_limit:
            return None
        if fit.host + self._published_within(options) > self.problem.host_memory_limit:
            return None
        limited = tuple(self.table.limited(o, fit.largest_batches.get(o.name)) for o in options)
        seconds = {name: value for option in limited for name, value in option.seconds.items()}
        return GroupChoice(tuple(options), fit, seconds, sum(option.total for option in limited))

    def choice(
        self, partition: Partition, devices: tuple[Devices, ...], groups: Sequence[GroupChoice], cutoff: float
    ) -> Choice | None:
        """Return a whole choice with its period, or None if this is not below a cutoff."""
        seconds = self.seconds(partition, groups)
        if partition.bound(seconds) >= cutoff:
            return None
        self.num_periods += 1
        period, cycle = partition.period(seconds)
        if period >= cutoff or not self._fits_hosts(devices, groups):
            return None
        return Choice(partition, devices, tuple(groups), seconds, period, cycle)

    def seconds(self, partition: Partition, groups: Sequence[GroupChoice]) -> dict[str, float]:
        """Return the seconds of nodes, of the source, and of new weights."""
        seconds = dict(self.table.constant_seconds)
        group_of: dict[str, int] = {}
        option_of: dict[str, ReplicaOption] = {}
        for i, group in enumerate(groups):
            seconds |= group.seconds
            for option in group.options:
                group_of[option.name], option_of[option.name] = i, option
        stream = self.table.events.stream
        source = sum(seconds.pop(f"{name} source", 0.0) for name in stream.replicas)
        for name in stream.replicas:
            if share := partition.share_of_kept_weights(name):
                source += share * self.table.waking(option_of[name])
        seconds[stream.source] = source
        for name, option in option_of.items():
            model = option.replica.model
            if option.replica.role != "gen" or model not in self.problem.written:
                continue
            src = next(o for n, o in option_of.items() if o.replica.model == model and n != name)
            seconds |= self._new_weights(src, option, group_of[src.name] == group_of[name]).seconds
        return seconds

    def fixed_devices(self, block: tuple[str, ...]) -> Devices | None:
        """Return the devices of the named group that a block contains, or None if it contains none."""
        for group in self.problem.fixed:
            if set(group.replicas) <= set(block):
                return group.devices
        return None

    def costed_devices(self, block: tuple[str, ...], devices: Devices) -> Devices:
        """Return the devices for which a group is costed: free ones count like others on as many machines."""
        if self.fixed_devices(block) is not None:
            return devices
        return comparable_devices(devices, self.problem.cluster)

    def costed(self, choice: Choice, block: tuple[str, ...]) -> Devices:
        """Return the devices for which a group of a choice was costed."""
        return self.costed_devices(block, choice.devices[choice.partition.blocks.index(block)])

    def pace(self, choice: Choice) -> Pace | None:
        """Return how fast the engines of a choice generate, or None without engines."""
        return self.table.pace(
            [
                (option, group.fit.largest_batches.get(option.name))
                for group in choice.groups
                for option in group.options
            ]
        )

    def _new_weights(self, src: ReplicaOption, gen: ReplicaOption, together: bool) -> NewWeights:
        """Return what it takes to give an engine new weights."""
        key = src, gen, together
        if key not in self._routes:
            self._routes[key] = self._cost_route(src, gen, together)
        return self._routes[key]

    def _cost_route(self, src: ReplicaOption, gen: ReplicaOption, together: bool) -> NewWeights:
        problem = self.problem
        engine = gen.replica if together else _moved_behind(gen.replica, src.replica)
        config = replace(src.config, gen=gen.config.gen)
        request = replace(problem.request, models={**problem.request.models, engine.model: config})
        route = weight_route(src.replica, engine, request, with_bytes)
        plan = replace(
            problem.base, cluster=problem.cluster, replicas=(src.replica, engine), weights=(route,)
        )
        stream = self.table.events.stream.name
        costs = Costs(plan, request, problem.hardware, problem.workloads[stream], ())
        loading, publishing = costs.weights(route), costs.publish_weights(route)
        seconds = {
            gen.name: sum(part.seconds for part in loading or ()),
            publish(gen.name): sum(part.seconds for part in publishing or ()),
        }
        sizes = [items.total() for _, items in published_by(plan, request, route)]
        return NewWeights(seconds, route, max(sizes, default=0))

    def _published_within(self, options: Sequence[ReplicaOption]) -> float:
        """Return the bytes of published weights in host memory for each device of a group.

        They count for models of which the group has both the trainer and the engine.
        """
        if math.isinf(self.problem.host_memory_limit):
            return 0.0
        per_machine = self.problem.cluster.devices_per_node
        num_devices = min(per_machine, max((option.layout.world for option in options), default=1))
        return sum(
            self._new_weights(src, gen, together=True).host_bytes / num_devices
            for src, gen in _senders(options, self.problem.written)
        )

    def _fits_hosts(self, devices: Sequence[Devices], groups: Sequence[GroupChoice]) -> bool:
        """Return whether machines have room for weights published from one group to another.

        Nothing is counted machine by machine if each would have room for all of them.
        """
        problem, cluster = self.problem, self.problem.cluster
        capacity = problem.host_memory_limit * cluster.devices_per_node
        group_of = {option.name: i for i, group in enumerate(groups) for option in group.options}
        options = [option for group in groups for option in group.options]
        routes = [
            (src, gen, self._new_weights(src, gen, together=False))
            for src, gen in _senders(options, problem.written)
            if group_of[src.name] != group_of[gen.name]
        ]
        if math.isinf(capacity) or not sum(new.host_bytes for _, _, new in routes):
            return True
        used: Counter[int] = Counter()
        for own, group in zip(devices, groups, strict=True):
            kept = group.fit.host + self._published_within(group.options)
            for machine, num in Counter(map(cluster.node_of, own)).items():
                used[machine] += round(kept * num)
        for src, gen, new in routes:
            replicas = tuple(
                on_workers(o.replica, devices[group_of[o.name]][: o.layout.world]) for o in (src, gen)
            )
            plan = replace(problem.base, cluster=cluster, replicas=replicas)
            for machine, items in published_by(plan, problem.request, new.route):
                used[machine] += items.total()
        return max(used.values()) <= capacity

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
                and not engine_kind(other.replica.backend).has_own_process
                for other in options
            )
            for option in options
        )

    def _search_group(self, block: tuple[str, ...], devices: Devices) -> GroupChoice | None:
        """Return the fastest combination of options; offloading is tried where memory makes it slower."""
        tables = [self.table.options(name, devices) for name in block]
        if not all(tables):
            return None
        fastest = sum(table[0].total for table in tables)
        first = self.group(block, [table[0] for table in tables])
        if first is not None and first.total <= fastest:
            return first
        found = self._fastest_fit(block, tables)
        # A faster combination has no option that loses more than all options of this one together.
        loss = math.inf if found is None else found.total - fastest
        wider = []
        for name, table in zip(block, tables, strict=True):
            options = self.table.options(name, devices, with_offload=True)
            wider.append([option for option in options if option.total - table[0].total < loss])
        if all(o.config.offload == self.problem.config(o.name).offload for row in wider for o in row):
            return found
        return self._fastest_fit(block, wider) or found

    def _fastest_fit(
        self, block: tuple[str, ...], tables: Sequence[Sequence[ReplicaOption]]
    ) -> GroupChoice | None:
        """Try combinations of options in the order of their seconds, until one fits.

        What an engine takes depends on the room that is left for its cache, so a combination that fits waits
        until no other one can be faster.
        """
        tables = self._useful(block, self._with_room(block, tables))
        if not all(tables):
            return None
        order = count()
        start = (0,) * len(tables)
        heap: list[tuple[float, int, tuple[int, ...], GroupChoice | None]] = []
        heap.append((sum(table[0].total for table in tables), next(order), start, None))
        seen = {start}
        for _ in range(MAX_TRIES):
            if not heap:
                break
            _, _, index, found = heapq.heappop(heap)
            if found is not None:
                return found
            choice = self.group(block, [table[i] for table, i in zip(tables, index, strict=True)])
            if choice is not None:
                heapq.heappush(heap, (choice.total, next(order), index, choice))
            for axis, i in enumerate(index):
                after = (*index[:axis], i + 1, *index[axis + 1 :])
                if i + 1 < len(tables[axis]) and after not in seen:
                    seen.add(after)
                    total = sum(table[i].total for table, i in zip(tables, after, strict=True))
                    heapq.heappush(heap, (total, next(order), after, None))
        return min((row[3] for row in heap if row[3] is not None), key=lambda c: c.total, default=None)

    def _useful(
        self, block: tuple[str, ...], tables: Sequence[Sequence[ReplicaOption]]
    ) -> list[tuple[ReplicaOption, ...]]:
        """Leave out options that are neither faster nor smaller than an earlier one."""
        phases, apart = self.phases(block), self.apart(block)
        kept = []
        for table in tables:
            useful: list[tuple[ReplicaOption, tuple[int, ...]]] = []
            for option in table:
                sizes = self.memory.sizes(phases, option, apart)
                if not any(all(a <= b for a, b in zip(s, sizes, strict=True)) for _, s in useful):
                    useful.append((option, sizes))
            kept.append(tuple(option for option, _ in useful))
        return kept

    def _with_room(
        self, block: tuple[str, ...], tables: Sequence[Sequence[ReplicaOption]]
    ) -> list[tuple[ReplicaOption, ...]]:
        """Leave out options that do not even fit beside the smallest ones of the other replicas.

        Where memory is tight these are nearly all, and they are the fastest.
        """
        phases, apart = self.phases(block), self.apart(block)
        sizes = [[self.memory.sizes(phases, option, apart) for option in table] for table in tables]
        smallest = [[min(column) for column in zip(*rows, strict=True)] for rows in sizes]
        limit = self.problem.memory_limit - self.memory.runtime
        room = [limit - sum(column) for column in zip(*smallest, strict=True)]
        return [
            tuple(
                option
                for option, row in zip(table, rows, strict=True)
                if all(size - low <= left for size, low, left in zip(row, lows, room, strict=True))
            )
            for table, rows, lows in zip(tables, sizes, smallest, strict=True)
        ]


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
