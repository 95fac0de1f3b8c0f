"""`Costs`: the parts of the time of each source, node and engine in one plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from hflow.config.schema import ONE_PROCESS, ModelConfig
from hflow.graph.ir import Level, NodeSpec
from hflow.planner.forecast.cost.collectives import RankPlacement
from hflow.planner.forecast.cost.flops import Work, work_of
from hflow.planner.forecast.cost.generation import RolloutRequest, generate, seconds_per_token
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.roofline import COMPUTE, HOST, Part
from hflow.planner.forecast.cost.training import forward, train, update
from hflow.planner.forecast.cost.transfers import (
    keep_weights,
    load_weights,
    offload,
    publish_weights,
    redistribute,
    save_checkpoint,
)
from hflow.planner.forecast.memory.offload import Use, moved_bytes
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.models.choices import attention_choice
from hflow.planner.plan.calibration import Calibration
from hflow.planner.plan.forecast import EdgeTraffic, Pace
from hflow.planner.plan.hardware import Link
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import SAVE_PREFIX, Plan, Replica, Schedule, ScheduledNode, WeightRoute
from hflow.planner.plan.schedule import share_of_unchanged_wakes, shared_groups, trains_on_engine_devices
from hflow.planner.plan.workload import Workload, expected_max, sample_lengths

Parts = list[Part] | None
"""None where the planner does not know the sizes of a model that it needs."""
EPISODES = "episodes"
"""The part of a source in which the controller handles samples and no engine computes."""


class Operands(NamedTuple):
    """What an infer or train node passes through a model."""

    replica: ReplicaCosts
    work: Work
    """One rank's samples; of a train node those of one minibatch."""
    num_updates: int
    """Minibatches times epochs; 1 for inference."""
    trains: bool


class Costs:
    """Estimates the seconds of the nodes on a plan's trained stream."""

    def __init__(
        self,
        plan: Plan,
        request: PlanRequest,
        workload: Workload,
        traffic: Sequence[EdgeTraffic],
    ) -> None:
        self._plan = plan
        self._request = request
        self._hardware = request.hardware
        self.workload = workload
        self._stream = plan.schedule.streams[0]
        self._edges = {edge.consumer: edge for edge in traffic}
        self._cuts = dict(plan.cuts)
        self._shapes = dict(plan.shapes)
        num = request.batch * self._stream.group_size
        self._lengths = sample_lengths(workload, num, request.seed)
        self._replicas: dict[str, ReplicaCosts | None] = {}
        self.rollout = RolloutRequest(
            groups=request.batch,
            group_size=self._stream.group_size,
            max_concurrent=request.schedule.max_concurrent,
            ahead=request.schedule.certified_lag,
            seed=request.seed,
        )

    def with_config(self, name: str, config: ModelConfig) -> Costs:
        """Return the costs of the plan with another configuration of one replica's model, of the same dtype.

        It has as many running sequences as the cache of an engine holds.
        """
        replica, other = self.replica(name), object.__new__(Costs)
        replicas = {**self._replicas, name: replica and replica.with_config(config)}
        vars(other).update(vars(self), _replicas=replicas)
        return other

    def source(self) -> Parts:
        """Return the time of one whole batch. The engines of an episode take turns.

        Encoded samples are made ahead and take no time. An engine that comes back from its sleep with the
        weights that it had is part of this.
        """
        parts = self.generation()
        return None if parts is None else [*parts, *self.beside_engines(sum(part.seconds for part in parts))]

    def generation(self) -> Parts:
        """Return the time of the engines for one whole batch."""
        replicas = self.engines()
        if replicas is None:
            return None
        parts: list[Part] = []
        for name, replica in replicas.items():
            mark = f"{name} " if len(replicas) > 1 else ""
            of_engine = generate(replica, self.workload, self.rollout)
            if share := self._share_of_kept_weights(name):
                of_engine += [part.times(share) for part in keep_weights(replica)]
            parts += [part._replace(name=mark + part.name) for part in of_engine]
        return parts

    def beside_engines(self, seconds: float) -> list[Part]:
        """Return the time of a batch besides that of its engines."""
        hidden = seconds if self._is_beside else 0.0
        samples = len(self._lengths) * self._sample_seconds
        return [Part(EPISODES, max(0.0, samples - hidden), HOST), *self._source_body()]

    @property
    def _sample_seconds(self) -> float:
        """Seconds of one sample outside of its engine."""
        return self._hardware.calibration.sample_us * 1e-6

    @property
    def _is_beside(self) -> bool:
        """Whether engines compute while the controller handles samples; on a CPU they share cores."""
        return self._hardware.device.type != "cpu"

    def _source_body(self) -> list[Part]:
        """Return the time that the source's node type states for one sample. Samples run at the same time."""
        spec = self._plan.graph.node(self._stream.source).spec
        return [self._stated_cost(spec, Level.SAMPLE)] if spec.cost else []

    def pace(self) -> Pace | None:
        """Return the source's seconds per token. The engines of an episode take turns."""
        replicas, rollout = self.engines(), self.rollout
        if not replicas:
            return None
        slots = min(math.prod(rollout.slots(replica)) for replica in replicas.values())
        steps = tuple((num, self._token_seconds(replicas.values(), num)) for num in _running_counts(slots))
        beside = sum(part.seconds for part in self._source_body())
        return Pace(slots, steps[-1][1], steps, beside)

    def _token_seconds(self, replicas: Iterable[ReplicaCosts], num: int) -> float:
        """Return the seconds in which each of some running responses gets one token."""
        generating = sum(seconds_per_token(r, self.workload, self.rollout, num) for r in replicas)
        episodes = num * self._sample_seconds / expected_max(self.workload, 1)
        return max(generating, episodes) if self._is_beside else generating + episodes

    def node(self, node: ScheduledNode) -> Parts:
        """Return the time of one execution of a node."""
        edge = self._edges.get(node.name)
        hardware = self._hardware.at(min(self._plan.placement(node.name).heads, default=0))
        moving = [] if edge is None else [redistribute(edge, self._longest_link, hardware)]
        if node.level is not Level.BATCH:
            moving = [part._replace(seconds=part.seconds / self._num_firings(node)) for part in moving]
        body = self._body(node)
        if body is None:
            return None
        messages = [self._messages] if node.level is Level.BATCH else []
        return [*messages, *moving, *body, *self.offloading(node)]

    @property
    def calibration(self) -> Calibration:
        """The rates that programs reach on the plan's devices."""
        return self._hardware.calibration

    @property
    def _messages(self) -> Part:
        """The time between controller and workers of a batch node, or of a weight update."""
        has_processes = self._request.settings.get("workers") not in ONE_PROCESS
        micros = self.calibration.node_us + has_processes * self.calibration.process_us
        return Part("messages", micros * 1e-6, HOST)

    def weights(self, route: WeightRoute) -> Parts:
        """Return the time in which an engine loads new weights."""
        replica = self.replica(route.dst)
        if replica is None:
            return None
        senders, workers = self._plan.replica(route.src).workers, self._plan.replica(route.dst).workers
        ranks = RankPlacement.of(workers, self._plan.cluster, self._hardware.at(workers[0]))
        merges = self._plan.replica(route.dst).merges_adapters
        network = self._hardware.network((*senders, *workers))
        loading = load_weights(route, replica, ranks, network, len(senders), merges)
        if set(senders).isdisjoint(workers):  # they were published before
            return [self._messages, *loading]
        return [self._messages, *loading, *self._moving_state(route.src, "weights")]

    def publish_weights(self, route: WeightRoute) -> Parts:
        """Return the time in which the trainer publishes new weights of an engine."""
        source, engine = self.replica(route.src), self.replica(route.dst)
        if source is None or engine is None:
            return None
        return [*publish_weights(route, source, engine), *self._moving_state(route.src, "weights")]

    def offloading(self, node: ScheduledNode) -> list[Part]:
        """Return the time in which the models that a node uses come from host memory, and return there."""
        verb = "save" if node.saves else self._plan.graph.node(node.name).spec.verb
        if verb not in ("infer", "train", "update", "save"):
            return []
        use: Use = "everything" if verb in ("train", "save") else "weights"
        names = self._plan.placement(node.name).replicas
        changing = () if verb in ("infer", "save") else names[:1]
        return [part for name in names for part in self._moving_state(name, use, name in changing)]

    def _moving_state(self, name: str, use: Use, changes: bool = False) -> list[Part]:
        """Return the time in which a replica's state comes from host memory; if it changes, also back."""
        placed = next((replica for replica in self._plan.replicas if replica.name == name), None)
        replica = None if placed is None else self.replica(name)
        if placed is None or replica is None:
            return []
        base = self._moving_state(placed.base_of, "weights") if placed.base_of else []
        if replica.config.offload == "none" or (placed.base_of and not placed.adapter_parameters):
            return base
        on_cpu = self._plan.cluster.device == "cpu"
        rank = Rank(placed, replica.shape, replica.config, 0, True, on_cpu)
        return base + offload(moved_bytes(rank, use, changes=changes), replica)

    @cached_property
    def _longest_link(self) -> Link:
        return self._hardware.network((0, self._plan.cluster.num_devices - 1))

    def wake_with_kept_weights(self, engine: str) -> Parts:
        """Return the time in which an engine that kept a copy of its weights takes them back."""
        replica = self.replica(engine)
        return None if replica is None else keep_weights(replica)

    def _share_of_kept_weights(self, name: str) -> float:
        """Return the fraction of steps in which an engine sleeps and keeps a copy of its weights."""
        replica = self._plan.replica(name)
        is_shared = any(route.dst == name and route.how == "shared" for route in self._plan.weights)
        config = self._request.model(replica.model)
        return share_of_kept_weights(self._plan.schedule, replica, config, is_shared=is_shared)

    def engines(self) -> dict[str, ReplicaCosts] | None:
        """Return the replicas that generate by name; None if the sizes of one are unknown."""
        replicas = {name: self.replica(name) for name in self._stream.replicas}
        known = {name: replica for name, replica in replicas.items() if replica is not None}
        return known if len(known) == len(replicas) else None

    def _body(self, node: ScheduledNode) -> Parts:
        placement = self._plan.placement(node.name)
        spec = None if node.name.startswith(SAVE_PREFIX) else self._plan.graph.node(node.name).spec
        if spec is not None and spec.cost:
            return [self._stated_cost(spec, node.level)]
        if spec is not None and spec.verb not in ("infer", "train", "update"):
            return []
        replica = self.replica(placement.replicas[0])
        if replica is None:
            return None
        if spec is None:
            return save_checkpoint(replica)
        if spec.verb == "update":
            return update(replica)
        operands = self.operands(node)
        assert operands is not None, f"{node.name} passes samples through a model of known sizes"
        _, work, num_updates, trains = operands
        if not trains:
            return forward(replica, work)
        balance = replica.config.balance
        counts_first = balance is not None and balance.over == "batch"
        num_first = spec.has_first_pass + counts_first
        first = [part.times(num_updates) for part in forward(replica, work)] if num_first else []
        return [*(num_first * first), *train(replica, work, num_updates)]

    def operands(self, node: ScheduledNode) -> Operands | None:
        """Return the samples of an infer or train node and its model; None if its sizes are unknown."""
        spec = None if node.name.startswith(SAVE_PREFIX) else self._plan.graph.node(node.name).spec
        if spec is None or spec.cost or spec.verb not in ("infer", "train"):
            return None
        replica, edge = self.replica(self._plan.placement(node.name).replicas[0]), self._edges.get(node.name)
        if replica is None:
            return None
        work = self._work(replica)
        if node.level is not Level.BATCH:
            share = 1 / self._num_firings(node) / replica.layout.num_copies
            return Operands(replica, work.share(share), 1, trains=False)
        heaviest = (1.0 if edge is None else edge.imbalance) / replica.layout.num_copies
        if spec.verb == "infer":
            share = dict(self.workload.shares).get(str(spec.option("mask")), 1.0)
            return Operands(replica, work.share(heaviest * share), 1, trains=False)
        cut = self._cuts[node.name]
        minibatch = work.share(heaviest / cut.minibatches)
        return Operands(replica, minibatch, cut.minibatches * cut.epochs, trains=True)

    def _num_firings(self, node: ScheduledNode) -> int:
        """Return the executions of a node of samples or groups in a step, one for each of them."""
        return len(self._lengths) // (1 if node.level is Level.SAMPLE else self._stream.group_size)

    def _stated_cost(self, spec: NodeSpec, level: Level) -> Part:
        """Return the seconds that a custom node type states for one sample, group or batch."""
        size, num = self._stream.group_size, len(self._lengths)
        sequences = {Level.SAMPLE: 1, Level.GROUP: size, Level.BATCH: num}[level]
        amounts = {
            "constant": 1.0,
            "tokens": sum(self._lengths) * sequences / num,
            "sequences": sequences,
            "groups": max(1.0, sequences / size),
        }
        return Part("body", sum(amounts[name] * seconds for name, seconds in spec.cost), COMPUTE)

    def _work(self, replica: ReplicaCosts) -> Work:
        """Return the work of the whole batch on a replica's backend."""
        budget = replica.config.tokens_per_microbatch if replica.traits.shares_prompts else None
        return _batch_work(
            self.workload, len(self._lengths), self._stream.group_size, self._request.seed, budget
        )

    def replica(self, name: str) -> ReplicaCosts | None:
        """Return the costs of a replica; None if the sizes of its model are unknown."""
        if name not in self._replicas:
            replica = self._plan.replica(name)
            shape, config = self._shapes.get(replica.model), self._config(replica)
            first, cluster = replica.workers[0], self._plan.cluster
            self._replicas[name] = (
                None
                if shape is None
                else ReplicaCosts.of(
                    replica,
                    shape,
                    config,
                    self._hardware.at(first).with_cores(len(cluster.cores_of(first))),
                    cluster,
                    attention_choice(replica, self._request).kernel,
                )
            )
        return self._replicas[name]

    def _config(self, replica: Replica) -> ModelConfig:
        """Return the configuration of a model, with as many running sequences as its engine's cache holds."""
        config = self._request.model(replica.model)
        engine = next((engine for engine in self._plan.engines if engine.replica == replica.name), None)
        if engine is None or engine.largest_batch is None:
            return config
        max_running = min(config.gen.max_running, engine.largest_batch)
        return replace(config, gen=replace(config.gen, max_running=max_running))


def _running_counts(slots: int) -> list[int]:
    """Return numbers of running responses up to all slots, each about 1.4 times the one before."""
    counts = {slots}
    while min(counts) > 1:
        counts.add(max(1, math.floor(min(counts) / math.sqrt(2))))
    return sorted(counts)


@lru_cache
def _batch_work(workload: Workload, num: int, group_size: int, seed: int, budget: int | None) -> Work:
    """Return the work of a batch of `num` samples with sampled lengths."""
    lengths = sample_lengths(workload, num, seed)
    return work_of(lengths, workload.prompt, group_size, budget, workload.images)


def share_of_kept_weights(
    schedule: Schedule, engine: Replica, config: ModelConfig, *, is_shared: bool
) -> float:
    """Return the fraction of steps in which an engine sleeps and keeps a copy of its weights.

    An engine that shares its devices drops them where it wakes with new ones (`share_of_unchanged_wakes`),
    unless only adapters are replaced. It generates the trained stream. If `is_shared`, it may use its
    trainer's weights in place.
    """
    if not shared_groups(schedule, engine.name) or (is_shared and config.compute_dtype == "fp32"):
        return 0.0
    if config.lora is not None and not engine.merges_adapters:
        return 1.0
    is_trained = trains_on_engine_devices(schedule, engine)
    return share_of_unchanged_wakes(schedule, engine.name, trains_on_its_devices=is_trained)
