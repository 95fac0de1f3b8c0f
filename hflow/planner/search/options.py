"""`OptionTable`: the layouts and settings with which a replica can use devices, and their seconds."""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import le
from typing import Any, Literal

from hflow.config.schema import ModelConfig, Offload
from hflow.data_plane.minibatches import heaviest_load, minibatch_units
from hflow.graph.queries import root_stream
from hflow.planner.forecast.cost.nodes import Costs
from hflow.planner.forecast.memory.offload import on_device
from hflow.planner.forecast.memory.parts import engine_weights
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.make.replicas import Devices
from hflow.planner.models.descriptors import engine_kind, training_backend
from hflow.planner.plan.forecast import EdgeTraffic, Pace
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import EngineChoice, Plan, Replica, ScheduledNode
from hflow.planner.plan.traits import traits
from hflow.planner.plan.workload import sample_lengths
from hflow.planner.search.group_memory import GroupMemory
from hflow.planner.search.layouts import Cut, comparable_devices, cut_of, layouts_for
from hflow.planner.search.memo import memo
from hflow.planner.search.problem import SearchProblem
from hflow.planner.search.replica_option import ReplicaOption
from hflow.shapes.model_shape import ModelShape

MANY_DEVICES = 32
"""Beyond this many devices there are fewer choices of stages and micro-batches."""
LEAST_COMPARED = 128
"""With so many free devices, and more, only layouts are tried everywhere that are of use on some numbers."""
COMPARED = (1, 0.75)
"""These numbers are parts of the free devices, fourths of these and so on, as twos and threes divide them."""
MIN_ADVANTAGE = 0.03
"""Relative difference of seconds from which on a layout makes another one useless that is not smaller."""
TOKENS = tuple(1 << i for i in range(16, 5, -1))
"""Tokens of a micro-batch to choose from where they hold the longest sequence, besides exactly this."""
MAX_RUNNING = (1024, 512, 256, 128, 64, 32)
"""Sequences that an engine decodes at once to choose from. More need a larger cache than GPUs have, or make
every response slow."""
FEW_RUNNING = (16, 8, 4, 2, 1)
"""Further choices for an engine whose cache grows as needed, so that fewer sequences make it smaller."""
LOWER_STAGES: tuple[Literal[2, 1], ...] = (2, 1)
"""Stages of ZeRO to choose from besides 3."""
MIN_STAGE_GAIN = 0.05
"""Relative difference of seconds from which on a lower stage is worth its memory."""
MAX_SAMPLES = 4096
"""Most samples of a batch from which the loads of ranks are computed."""
MIN_DIFFERENCE = 1e-3
"""Relative difference of seconds below which more memory is not worth it."""


class OptionTable:
    """The options of each replica, computed when they are first asked for."""

    def __init__(self, problem: SearchProblem, memory: GroupMemory) -> None:
        self._problem = problem
        self._memory = memory
        self._base = replace(problem.base, cluster=problem.cluster, hardware=problem.request.hardware)
        self._latest_costs: dict[Replica, Costs] = {}
        """Replica -> what its last option made, which has kept what depends on no setting."""
        self._changed_configs: dict[tuple[Hashable, ...], tuple[ModelConfig, ModelConfig]] = {}
        """(`id` of a configuration, its changed settings) -> both configurations."""

    def options(
        self, name: str, devices: Devices, *, with_too_large: bool = False, with_offload: bool = False
    ) -> tuple[ReplicaOption, ...]:
        """Return the options of a replica on some devices: the fastest first, then the fewest cuts.

        Args:
            with_too_large: whether to add options whose weights and optimizer state alone do not fit.
            with_offload: whether to add options with other values of `offload`, if it is free.
        """
        return self._sorted_options(name, devices, with_too_large, with_offload)

    @memo
    def _sorted_options(
        self, name: str, devices: Devices, with_too_large: bool, with_offload: bool
    ) -> tuple[ReplicaOption, ...]:
        if with_offload:
            plain = self._sorted_options(name, devices, with_too_large, False)
            made = [other for option in plain for other in self._offloaded(option)]
        else:
            useless = frozenset[Cut]() if with_too_large else self._useless_cuts(name, len(devices))
            made = [
                option
                for replica in self._replicas(name, devices, useless)
                if with_too_large or self._has_room(replica)
                for option in self._options_of(replica)
            ]
        return tuple(sorted(made, key=_order))

    @memo
    def least_seconds(self, name: str, devices: Devices) -> Mapping[str, float]:
        """Return the least seconds of each node and source of a replica, of all options on some devices."""
        options = self.options(name, devices)
        return {key: min(option.seconds[key] for option in options) for key in options[0].seconds}

    @memo
    def _options_of(self, replica: Replica) -> tuple[ReplicaOption, ...]:
        """Return the options of a replica with this layout."""
        made: list[ReplicaOption] = []
        for configs in self._configs(replica):
            same_batches = {option.config.tokens_per_microbatch: option for option in made}
            made += self._faster(replica, configs, same_batches)
        return tuple(other for option in made for other in self._stages(option))

    @memo
    def limited(self, option: ReplicaOption, largest_batch: int | None) -> ReplicaOption:
        """Return an engine's option with as many sequences at once as its cache holds."""
        if largest_batch is None or largest_batch >= option.config.gen.max_running:
            return option
        return self.option(option.replica, option.config, largest_batch)

    @memo
    def waking(self, option: ReplicaOption) -> float:
        """Return the seconds in which an engine that kept its weights takes them back."""
        return _seconds(self._costs_of(option.replica).wake_with_kept_weights(option.name))

    def pace(self, chosen: Sequence[tuple[ReplicaOption, int | None]]) -> Pace | None:
        """Return the pace of the trained stream, given options and the sequences in engines' caches."""
        request, base = self._request, self._base
        engines = tuple(
            EngineChoice(option.name, option.replica.backend, "", None, largest)
            for option, largest in chosen
            if option.replica.role == "gen"
        )
        configs = {o.replica.model: o.config for o, _ in chosen if o.replica.role == "gen"}
        request = replace(request, models={**request.models, **configs})
        plan = replace(base, replicas=tuple(option.replica for option, _ in chosen), engines=engines)
        workload = self._problem.workloads[self._problem.events.stream.name]
        return Costs(plan, request, workload, ()).pace()

    def beside_engines(self, seconds: float) -> float:
        """Return a batch's seconds besides those of its engines."""
        return _seconds(self._base_costs.beside_engines(seconds))

    @cached_property
    def constant_seconds(self) -> Mapping[str, float]:
        """Node without a model -> its seconds."""
        return {node.name: _seconds(self._base_costs.node(node)) for node in self._nodes_of.get("", ())}

    @cached_property
    def _base_costs(self) -> Costs:
        """Costs of what does not depend on devices."""
        return self._make_costs(self._base)

    def _replicas(self, name: str, devices: Devices, useless: Container[Cut]) -> Iterator[Replica]:
        base = self._problem.replica(name)
        shape = self._problem.request.shapes.get(base.model)
        for layout in layouts_for(self._problem, name, devices, is_large=self._is_large):
            if not useless or cut_of(layout, shape) not in useless:
                yield on_workers(replace(base, layout=layout), devices[: layout.world])

    @memo
    def _useless_cuts(self, name: str, num: int) -> frozenset[Cut]:
        """Return cuts that are of no use on a number of devices, as they are of none on more and on fewer.

        All cuts are compared on all free devices, and on some parts of them.
        """
        free, is_gen = len(self._problem.free_devices), self._problem.replica(name).role == "gen"
        if free < LEAST_COMPARED or is_gen or name in self._problem.layouts or self._problem.cluster.parts:
            return frozenset()
        compared = {int(free * share) // 4**i for i in range(free.bit_length()) for share in COMPARED} - {0}
        if num in compared or not min(compared) < num < free:
            return frozenset()
        near = min(n for n in compared if n > num), max(n for n in compared if n < num)
        (tried, useful), (others, useful_too) = (self._compare_cuts(name, size) for size in near)
        return (tried | others) - (useful | useful_too)

    @memo
    def _compare_cuts(self, name: str, num: int) -> tuple[frozenset[Cut], frozenset[Cut]]:
        """Return the cuts of a replica on some of the free devices, and those that are of use there.

        One is of use if it has an option beside which no other is clearly faster and as small.
        """
        shape = self._problem.request.shapes.get(self._problem.replica(name).model)
        tried, useful = set[Cut](), set[Cut]()
        front: list[tuple[float, tuple[int, int]]] = []
        devices = comparable_devices(self._problem.free_devices[:num], self._problem.cluster)
        for option in self.options(name, devices):
            cut, needs = cut_of(option.layout, shape), self._memory.needs(option)
            tried.add(cut)
            smaller = [total for total, other in front if all(map(le, other, needs))]
            if not smaller:
                front.append((option.total, needs))
            if min(smaller, default=math.inf) > option.total * (1 - MIN_ADVANTAGE):
                useful.add(cut)
        return frozenset(tried), frozenset(useful)

    def _faster(
        self, replica: Replica, configs: Iterable[ModelConfig], same_batches: Mapping[int, ReplicaOption]
    ) -> Iterator[ReplicaOption]:
        """Yield options with ever larger micro-batches, ascending, for as long as these make them faster.

        Larger ones need more memory for nothing. `same_batches` has an option of some sizes.
        """
        shortest = math.inf
        for config in configs:
            option = self.option(replica, config, like=same_batches.get(config.tokens_per_microbatch))
            if option.total >= shortest * (1 - MIN_DIFFERENCE):
                return
            shortest = option.total
            yield option

    def _configs(self, replica: Replica) -> Iterator[Iterable[ModelConfig]]:
        """Yield the configurations of a replica's model that differ for it, by ascending micro-batches."""
        problem, prefix = self._problem, f"models.{replica.model}"
        config = problem.request.model(replica.model)
        if replica.role == "gen":
            for number in self._running(replica, config, f"{prefix}.gen.max_running"):
                yield (self._with_running(replica.model, number),)
            return
        recompute: Sequence[bool] = (config.activation_checkpointing,)
        is_free = problem.is_free(f"{prefix}.activation_checkpointing") and not config.offload_activations
        if replica.role == "train" and is_free:
            recompute = (False, True)
        tokens: Sequence[int] = (config.tokens_per_microbatch,)
        if problem.is_free(f"{prefix}.tokens_per_microbatch"):
            tokens = self._tokens(replica)
        for recomputes in recompute:
            yield (
                self._changed(config, tokens_per_microbatch=number, activation_checkpointing=recomputes)
                for number in tokens
            )

    def _stages(self, option: ReplicaOption) -> Iterator[ReplicaOption]:
        """Yield an option, and the same with lower stages of ZeRO that shorten it."""
        yield option
        replica, config = option.replica, option.config
        is_free = self._problem.is_free(f"models.{replica.model}.zero_stage")
        if replica.role != "train" or not is_free or self._problem.cluster.device == "cpu":
            return
        if replica.layout.fsdp_size == 1 or not traits(replica.backend).shards_weights:
            return
        shortest = option.total
        for stage in LOWER_STAGES:
            lower = self.option(replica, self._changed(config, zero_stage=stage), like=option)
            if lower.total < shortest * (1 - MIN_STAGE_GAIN):
                shortest = lower.total
                yield lower

    def _offloaded(self, option: ReplicaOption) -> Iterator[ReplicaOption]:
        """Yield an option, and the same with other values of `offload`, whose nodes only take longer."""
        yield option
        replica, config = option.replica, option.config
        for offload in self._offloads(replica):
            if offload == config.offload:
                continue
            changed = self._changed(config, offload=offload)
            seconds, total = dict(option.seconds), option.total
            for node, added in self._offload_seconds(replica, offload).items():
                seconds[node.name] += added
                total += added * self._executions(node)
            yield ReplicaOption(replica, changed, seconds, total)

    @memo
    def _offload_seconds(self, replica: Replica, offload: Offload) -> Mapping[ScheduledNode, float]:
        """Return the seconds that an `offload` adds to each node of a replica, beyond the configured one."""
        old = self._costs_of(replica)
        config = replace(self._problem.request.model(replica.model), offload=offload)
        new = old.with_config(replica.name, config)
        return {
            node: _seconds(new.offloading(node)) - _seconds(old.offloading(node))
            for node in self._nodes_of.get(replica.name, ())
        }

    def _executions(self, node: ScheduledNode) -> float:
        """Return a node's executions in a step; 0 if it runs after the last step only."""
        if node.after + node.every >= self._base.schedule.num_steps and node.every > 1:
            return 0.0
        return self._problem.events.num_executions(node) / node.every

    def _offloads(self, replica: Replica) -> tuple[Offload, ...]:
        """Return the values of `offload` to try for a model."""
        configured = self._problem.request.model(replica.model).offload
        is_free = self._problem.is_free(f"models.{replica.model}.offload")
        if not is_free or replica.base_of or self._problem.cluster.device == "cpu":
            return (configured,)
        return ("none", "optimizer", "all") if replica.role == "train" else ("none", "all")

    @memo
    def _with_running(self, model: str, number: int) -> ModelConfig:
        """Return a model's configuration with `gen.max_running`."""
        config = self._problem.request.model(model)
        return replace(config, gen=replace(config.gen, max_running=number))

    def _changed(self, config: ModelConfig, **settings: Any) -> ModelConfig:
        """Return a configuration with other settings. Equal ones are one, as they are validated."""
        key = id(config), *settings.items()
        if key not in self._changed_configs:
            self._changed_configs[key] = config, replace(config, **settings)
        return self._changed_configs[key][1]

    def _has_room(self, replica: Replica) -> bool:
        """Return whether a device holds a replica's weights and optimizer state."""
        shape, config = self._problem.request.shapes.get(replica.model), self._problem.config(replica.name)
        if shape is None:
            return True
        device, kept = replica.workers[0], 0
        overhead = round(self._problem.request.hardware.at(device).device.overhead_gib * GIB)
        for stage in {0, replica.layout.pipe - 1}:
            rank = self._rank(replica, shape, config, stage)
            if replica.role != "gen":
                state = training_backend(replica.backend).memory.model_state(rank)
                kept = on_device(rank, state, "everything").total()
            elif traits(replica.backend).has_own_process:  # others may use the weights of their trainer
                kept = engine_weights(rank)
            if overhead + kept > self._problem.memory_limit(device):
                return False
        return True

    def _tokens(self, replica: Replica) -> list[int]:
        """Return sizes of micro-batches from the longest sequence to a rank's part of the largest batch."""
        group = self._problem.events.stream.group_size
        share = -(-self._problem.request.batch * group // replica.layout.data) * self._problem.longest
        configured = self._problem.request.model(replica.model).tokens_per_microbatch
        numbers = {number for number in TOKENS if number >= self._problem.longest} | {self._problem.longest}
        useful = {number for number in numbers if number < 2 * share}
        if self._is_large:
            useful = set(sorted(useful)[::2])
        return sorted({configured} | (useful or {min(numbers)}))

    @cached_property
    def _is_large(self) -> bool:
        """Return whether there are so many devices that every other choice is enough."""
        return self._problem.cluster.num_devices > MANY_DEVICES

    def _running(self, replica: Replica, config: ModelConfig, key: str) -> list[int]:
        if not self._problem.is_free(key):
            return [config.gen.max_running]
        group = self._problem.events.stream.group_size
        at_once = -(-self._problem.in_flight // replica.layout.data // group) * group
        memory = engine_kind(replica.backend).memory
        shape = self._problem.request.shapes.get(replica.model)
        grows = shape is not None and memory.max_sequences(self._rank(replica, shape, config), 1, 1.0) is None
        numbers = MAX_RUNNING + FEW_RUNNING if grows else MAX_RUNNING
        useful = {number for number in numbers if number < 2 * at_once}
        return sorted({config.gen.max_running} | (useful or {numbers[-1]}))

    def _rank(self, replica: Replica, shape: ModelShape, config: ModelConfig, stage: int = 0) -> Rank:
        return Rank(replica, shape, config, stage, stage == 0, self._problem.cluster.device == "cpu")

    def option(
        self,
        replica: Replica,
        config: ModelConfig,
        largest_batch: int | None = None,
        *,
        like: ReplicaOption | None = None,
    ) -> ReplicaOption:
        """Return an option with a configuration; the cache of an engine holds `largest_batch` sequences.

        `like` is an option that differs only in what a backward pass reads: its other nodes take as long.
        """
        limited = config
        if largest_batch is not None and largest_batch < config.gen.max_running:
            limited = self._with_running(replica.model, largest_batch)
        costs = self._latest_costs.get(replica) or self._costs_of(replica)
        costs = self._latest_costs[replica] = costs.with_config(replica.name, limited)
        seconds: dict[str, float] = {}
        total = 0.0
        if replica.role == "gen" and replica.name in self._problem.events.stream.replicas:
            seconds[f"{replica.name} source"] = total = _seconds(costs.generation())
        for node in self._nodes_of.get(replica.name, ()):
            is_known = like is not None and node.name not in self._trains
            seconds[node.name] = like.seconds[node.name] if like and is_known else _seconds(costs.node(node))
            total += seconds[node.name] * self._executions(node)
        return ReplicaOption(replica, config, seconds, total)

    @cached_property
    def _trains(self) -> frozenset[str]:
        """Nodes with a backward pass."""
        return frozenset(node.name for node in self._problem.graph.nodes if node.spec.verb == "train")

    @memo
    def _costs_of(self, replica: Replica) -> Costs:
        """Return the costs of a plan with one replica and the configured model."""
        stream = self._problem.events.stream
        stream = replace(stream, replicas=tuple(n for n in stream.replicas if n == replica.name))
        schedule = replace(self._base.schedule, streams=(stream, *self._base.schedule.streams[1:]), shared=())
        used = [replica]
        if replica.base_of and replica.role != "gen":  # its weights are a trainer's, on the same ranks
            trainer = replace(self._base.replica(replica.base_of), layout=replica.layout)
            used.append(on_workers(trainer, replica.workers))
        plan = replace(self._base, replicas=tuple(used), schedule=schedule)
        return self._make_costs(plan, self._traffic(replica))

    def _make_costs(self, plan: Plan, traffic: tuple[EdgeTraffic, ...] = ()) -> Costs:
        workload = self._problem.workloads[self._problem.events.stream.name]
        return Costs(replace(plan, engines=()), self._request, workload, traffic)

    @cached_property
    def _request(self) -> PlanRequest:
        """The request with as many samples in flight as are of use."""
        request = self._problem.request
        return replace(request, schedule=replace(request.schedule, max_concurrent=self._problem.in_flight))

    def _traffic(self, replica: Replica) -> tuple[EdgeTraffic, ...]:
        """Return the imbalance of each node of a replica, without the bytes that its inputs move."""
        rows = []
        for node in self._nodes_of.get(replica.name, ()):
            if node.name in self._rules:
                imbalance = self._imbalance_of(node.name, replica.layout.data)
                rows.append(EdgeTraffic(node.name, 0, 0, 0, imbalance, (), 0))
        return tuple(rows)

    @cached_property
    def _rules(self) -> dict[str, bool]:
        """Node that splits a batch -> whether it splits it by groups."""
        return {rule.consumer: rule.by_group for rule in self._base.rules if rule.fields}

    def _imbalance_of(self, node: str, num_ranks: int) -> float:
        """Return the tokens of the heaviest rank over the mean, for a batch with sampled lengths.

        Of a large batch on many ranks a part counts, on as many fewer ranks.
        """
        _, share = self._units_of(node)
        return self._sampled_imbalance(node, max(1, round(num_ranks * share)))

    @memo
    def _sampled_imbalance(self, node: str, num_ranks: int) -> float:
        minibatches, _ = self._units_of(node)
        loads = [heaviest_load(units, num_ranks) for units in minibatches]
        return sum(loads) * num_ranks / sum(map(sum, minibatches))

    @memo
    def _units_of(self, node: str) -> tuple[list[list[int]], float]:
        """Return the tokens of each unit that a node assigns, by minibatch, and their share of the batch."""
        request, stream = self._problem.request, self._problem.events.stream
        cut = dict(self._base.cuts).get(node)
        num_minibatches = cut.minibatches if cut else 1
        num_groups = min(request.batch, max(num_minibatches, MAX_SAMPLES // stream.group_size))
        lengths = sample_lengths(
            self._problem.workloads[stream.name], num_groups * stream.group_size, request.seed
        )
        size = root_stream(self._problem.graph, self._problem.graph.node(node)).group
        units = minibatch_units(lengths, size, cut, by_group=self._rules[node], seed=request.seed)
        return units, num_groups / request.batch

    @cached_property
    def _nodes_of(self) -> Mapping[str, Sequence[ScheduledNode]]:
        """Replica -> the nodes of the trained stream that run on it; those without a model are under ""."""
        nodes: dict[str, list[ScheduledNode]] = {}
        for node in self._base.schedule.nodes:
            if node.stream == self._problem.events.stream.name:
                replica = next(iter(self._base.placement(node.name).replicas), "")
                nodes.setdefault(replica, []).append(node)
        return nodes


def _order(option: ReplicaOption) -> tuple[float, int, int, bool, int, int]:
    """Return the order of options: time, then fewer cuts and sequences, and less memory."""
    config = option.config
    return (
        option.total,
        option.cuts,
        config.gen.max_running,
        config.activation_checkpointing,
        -config.zero_stage,
        config.tokens_per_microbatch,
    )


def _seconds(parts: Sequence[object] | None) -> float:
    return sum(part.seconds for part in parts or ())  # type: ignore[attr-defined]
