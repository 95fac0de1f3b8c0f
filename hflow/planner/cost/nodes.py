"""`Costs`: the parts of each source's, node's and replica's time in one plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hflow.graph.ir import Level, NodeSpec
from hflow.planner.cost.collectives import Ranks
from hflow.planner.cost.flops import Work, work_of
from hflow.planner.cost.generation import Rollout, batch_tokens, generate
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.roofline import COMPUTE, Part
from hflow.planner.cost.sync import publishing, redistribution, saving, sync
from hflow.planner.cost.training import forward, train, update
from hflow.planner.forecast import EdgeTraffic, Pace
from hflow.planner.hardware import Hardware
from hflow.planner.ir import SAVE_PREFIX, Plan, ScheduledNode, WeightRoute
from hflow.planner.request import PlanRequest
from hflow.planner.staleness import certified_lag
from hflow.planner.workload import Workload, sample_lengths

Parts = list[Part] | None
"""None where the sizes of a model are needed that the planner does not know."""


class Costs:
    """Estimates for the trained stream of a plan."""

    def __init__(
        self,
        plan: Plan,
        request: PlanRequest,
        hardware: Hardware,
        workload: Workload,
        traffic: Sequence[EdgeTraffic],
    ) -> None:
        self._plan = plan
        self._request = request
        self._hardware = hardware
        self._workload = workload
        self._stream = plan.schedule.streams[0]
        self._edges = {edge.consumer: edge for edge in traffic}
        self._cuts = dict(plan.cuts)
        self._shapes = dict(plan.shapes)
        num = request.batch * self._stream.group_size
        self._lengths = sample_lengths(workload, num, request.seed)
        self._sides: dict[str, ReplicaCosts | None] = {}
        self._rollout = Rollout(
            groups=request.batch,
            group_size=self._stream.group_size,
            max_concurrent=request.schedule.max_concurrent,
            ahead=certified_lag(request.schedule.max_staleness, request.schedule.sync_every),
            seed=request.seed,
        )

    def source(self) -> Parts:
        """One whole batch; engines of one episode take turns. Written samples are made ahead, in no time."""
        sides = self._engines()
        if sides is None:
            return None
        parts: list[Part] = []
        for name, side in sides.items():
            mark = f"{name} " if len(sides) > 1 else ""
            parts += [replace(p, name=mark + p.name) for p in generate(side, self._workload, self._rollout)]
        return parts

    def pace(self) -> Pace | None:
        """The source's seconds spread over the tokens of its batch; engines of one episode take turns."""
        sides, rollout = self._engines(), self._rollout
        if not sides:
            return None
        seconds = 0.0
        for side in sides.values():
            whole = sum(part.seconds for part in generate(side, self._workload, rollout))
            seconds += whole / batch_tokens(side, self._workload, rollout)
        return Pace(min(math.prod(rollout.slots(side)) for side in sides.values()), seconds)

    def node(self, node: ScheduledNode) -> Parts:
        """One firing of a node."""
        edge = self._edges.get(node.name)
        moving = [] if edge is None else [redistribution(edge, self._hardware)]
        if node.level is not Level.BATCH:
            moving = [replace(part, seconds=part.seconds / self._firings(node)) for part in moving]
        body = self._body(node, edge)
        return None if body is None else [*moving, *body]

    def weights(self, route: WeightRoute) -> Parts:
        """New weights for an engine's replica."""
        side = self._side(route.dst)
        if side is None:
            return None
        return sync(route, side, Ranks.of(self._plan.replica(route.dst).workers, self._plan.cluster))

    def publishing(self, route: WeightRoute) -> Parts:
        """New weights of an engine's replica, on the devices that train them."""
        source, engine = self._side(route.src), self._side(route.dst)
        return None if source is None or engine is None else publishing(route, source, engine)

    def _engines(self) -> dict[str, ReplicaCosts] | None:
        """Replica -> side, of those that generate; None where one's sizes are unknown."""
        sides = {name: self._side(name) for name in self._stream.replicas}
        known = {name: side for name, side in sides.items() if side is not None}
        return known if len(known) == len(sides) else None

    def _body(self, node: ScheduledNode, edge: EdgeTraffic | None) -> Parts:
        placement = self._plan.placement(node.name)
        spec = None if node.name.startswith(SAVE_PREFIX) else self._plan.graph.node(node.name).spec
        if spec is not None and spec.cost:
            return [self._stated(spec, node.level)]
        if spec is not None and spec.verb not in ("infer", "train", "update"):
            return []
        side = self._side(placement.replicas[0])
        if side is None:
            return None
        if spec is None:
            return saving(side)
        if spec.verb == "update":
            return update(side)
        work = self._work(side)
        if node.level is not Level.BATCH:
            return forward(side, work.share(1 / self._firings(node) / side.layout.data))
        heaviest = (1.0 if edge is None else edge.imbalance) / side.layout.data
        if spec.verb == "infer":
            return forward(side, work.share(heaviest))
        cut = self._cuts[node.name]
        return train(side, work.share(heaviest / cut.minibatches), cut.minibatches * cut.epochs)

    def _firings(self, node: ScheduledNode) -> int:
        """How often a node of samples or groups fires in a step, if each firing is for one of them."""
        return len(self._lengths) // (1 if node.level is Level.SAMPLE else self._stream.group_size)

    def _stated(self, spec: NodeSpec, level: Level) -> Part:
        """The seconds that a node's own type states, for one sample, group or batch."""
        size, num = self._stream.group_size, len(self._lengths)
        sequences = {Level.SAMPLE: 1, Level.GROUP: size, Level.BATCH: num}[level]
        amounts = {
            "constant": 1.0,
            "tokens": sum(self._lengths) * sequences / num,
            "sequences": sequences,
            "groups": max(1.0, sequences / size),
        }
        return Part("body", sum(amounts[name] * seconds for name, seconds in spec.cost), COMPUTE)

    def _work(self, side: ReplicaCosts) -> Work:
        """The whole batch, as a replica's backend computes it."""
        budget = side.asked.tokens_per_microbatch if side.backend.shares_prompts else None
        return work_of(self._lengths, self._workload.prompt, self._stream.group_size, budget)

    def _side(self, name: str) -> ReplicaCosts | None:
        if name not in self._sides:
            replica = self._plan.replica(name)
            shape, asked = self._shapes.get(replica.model), self._request.model(replica.model)
            self._sides[name] = (
                None
                if shape is None
                else ReplicaCosts.of(replica, shape, asked, self._hardware, self._plan.cluster)
            )
        return self._sides[name]
