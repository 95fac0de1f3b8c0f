"""Batches: run through their batch nodes, summed up, and freed.

It keeps the book of who holds what, so that a batch node's inputs are redistributed by the plan's
rule. A field of tokens is freed as soon as its last reader of the step is done, everything else
with the step.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from hflow.planner.data.data_locations import DataLocations
from hflow.planner.ir import TRAJECTORY_FIELDS, EdgeRule, Level, Plan
from hflow.planner.reported_field import reported_field
from hflow.runtime.execution.node_execution import NodeExecution, outputs
from hflow.runtime.execution.step_metrics import Observer, StepMetrics, means
from hflow.runtime.state.firing_rules import node_fires
from hflow.types import Unit
from hflow.workers.interface import NodeResult, Workers


@dataclass(frozen=True)
class StepBatch:
    """The samples that a step is made of, ids ascending."""

    stream: str
    step: int
    samples: tuple[int, ...]
    groups: tuple[int, ...]
    """The distinct groups, ascending."""
    group_size: int

    def members(self) -> dict[int, list[int]]:
        """Group -> its samples."""
        found: dict[int, list[int]] = {group: [] for group in self.groups}
        for sample in self.samples:
            found[sample // self.group_size].append(sample)
        return found


class BatchRunner:
    """What the executor does with the batches of all streams."""

    def __init__(
        self, plan: Plan, workers: Workers, observer: Observer, scores: StepMetrics, firing: NodeExecution
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._observer = observer
        self._scores = scores
        self._firing = firing
        self._num_steps = plan.schedule.num_steps
        self._nodes = {node.name: node for node in plan.schedule.nodes}
        self._rules = {rule.consumer: rule for rule in _batch_rules(plan)}
        self._roots = {name: plan.graph.root_stream(rule.stream).name for name, rule in self._rules.items()}
        self._side = frozenset(stream.name for stream in plan.schedule.streams if stream.batch is None)
        self._readers = _readers(plan)
        self._late = _late_fields(plan)
        self._batches: dict[tuple[str, int], StepBatch] = {}
        self._done: dict[int, set[str]] = defaultdict(set)
        """step -> batch nodes that are done."""
        self.holdings = {stream.name: DataLocations() for stream in plan.schedule.streams}

    def form(self, batch: StepBatch) -> None:
        """Keep a batch until its step is done."""
        self._batches[batch.stream, batch.step] = batch

    async def summarize(self, batch: StepBatch, is_evaluation: bool) -> None:
        """Average the stream's numeric fields; an evaluation that no batch node reads ends here."""
        home = self.holdings[batch.stream].by_home(batch.samples)
        parts = await asyncio.gather(
            *(self._workers.summarize(worker, batch.stream, held) for worker, held in home.items())
        )
        late = frozenset().union(*self._late.values())
        values = {name: x for name, x in means(list(parts)).items() if name.partition(".")[0] not in late}
        if is_evaluation:
            self._observer.on_evaluation(batch.step, values)
            if batch.stream not in self._roots.values():
                await self._release(batch)
            return
        lengths = self.holdings[batch.stream].lengths(batch.samples)
        sizes = {"batch/samples": float(len(lengths)), "batch/tokens": float(sum(lengths.values()))}
        self._scores.add(batch.step, {**values, **sizes})

    async def fire(self, node: str, step: int) -> None:
        """Redistribute a node's inputs by the plan's rule, run it, note its outputs."""
        batch = self._batches[self._roots[node], step]
        fired = await self._firing.fire(node, step, batch.members(), self.holdings[batch.stream])
        if fired.moved_bytes is not None:
            self._report(node, step, {f"{node}/moved_bytes": float(fired.moved_bytes)})
        for result in fired.results:
            self._report(node, step, {f"{node}/{name}": value for name, value in result.metrics.items()})
        await self._summarize_late(node, step, fired.results)

    async def close_step(self, step: int) -> None:
        """Free what is left of a step's batches."""
        self._done.pop(step, None)
        for batch in [batch for (_, at), batch in self._batches.items() if at == step]:
            await self._release(batch)

    async def _summarize_late(self, node: str, step: int, results: Sequence[NodeResult]) -> None:
        """Average what a body of samples or groups made that fires by batch, as `summarize` does.

        Of other batch nodes only the number that they tell of each sample.
        """
        found = self._plan.graph.node(node)
        if not found.spec.runs_as_compute or found.spec.level is Level.BATCH:
            if numbers := [number for made in results for number in made.numbers]:
                name = f"{found.stream}/{reported_field(self._plan.graph, node)}"
                self._report(node, step, {name: fsum(numbers) / len(numbers)})
            return
        parts = await asyncio.gather(
            *(self._workers.summarize(made.worker, found.stream, made.samples) for made in results)
        )
        own = self._late[node]
        values = {name: x for name, x in means(list(parts)).items() if name.partition(".")[0] in own}
        self._report(node, step, values)

    def _report(self, node: str, step: int, values: Mapping[str, float]) -> None:
        """Hand on what a node measured: a step's numbers, or those of the version that is evaluated."""
        if self._roots[node] not in self._side:
            self._scores.add(step, values)
        elif values:
            self._observer.on_evaluation(step, values)

    async def free_read(self, node: str, step: int) -> None:
        """Free the fields of tokens that nobody reads after this node in its step.

        What they are is settled before anything is awaited, so that the run may go on meanwhile. The
        last node leaves everything to `close_step`.
        """
        batch = self._batches[self._roots[node], step]
        done = self._done[step]
        done.add(node)
        own = [name for name, root in self._roots.items() if root == batch.stream]
        if self._due(own, step) <= done:
            return
        fields = [
            name
            for name in self._rules[node].fields
            if name in self._readers and self._due(self._readers[name], step) <= done
        ]
        if not fields:
            return
        held = self.holdings[batch.stream].drop_fields(fields, batch.samples)
        await asyncio.gather(
            *(
                self._workers.release(worker, samples, batch.stream, fields)
                for worker, samples in held.items()
            )
        )

    def _due(self, nodes: Iterable[str], step: int) -> set[str]:
        """Those nodes that fire at a step."""
        return {name for name in nodes if node_fires(self._nodes[name], step, self._num_steps)}

    async def _release(self, batch: StepBatch) -> None:
        holdings = self.holdings[batch.stream]
        held = holdings.workers_of(batch.samples)
        holdings.forget(batch.samples)
        del self._batches[batch.stream, batch.step]
        await asyncio.gather(
            *(self._workers.release(worker, samples, batch.stream, None) for worker, samples in held.items())
        )


def _batch_rules(plan: Plan) -> tuple[EdgeRule, ...]:
    """The rules of nodes that fire by batch."""
    levels = {node.name: node.level for node in plan.schedule.nodes}
    return tuple(rule for rule in plan.rules if levels[rule.consumer] is Level.BATCH)


def _late_fields(plan: Plan) -> dict[str, frozenset[str]]:
    """Batch node -> fields and metrics that are not there yet when a batch is formed."""
    nodes = [plan.graph.node(rule.consumer) for rule in _batch_rules(plan) if rule.fields]
    return {node.name: frozenset((*outputs(plan, node.name), f"{node.stream}/{node.name}")) for node in nodes}


def _readers(plan: Plan) -> dict[str, frozenset[str]]:
    """Field of tokens of a trained stream -> the batch nodes that read it."""
    trained = {stream.name for stream in plan.schedule.streams if stream.batch is not None}
    tokens = _token_fields(plan)
    readers: dict[str, set[str]] = defaultdict(set)
    for rule in _batch_rules(plan):
        if plan.graph.root_stream(rule.stream).name in trained:
            for name in tokens.intersection(rule.fields):
                readers[name].add(rule.consumer)
    return {name: frozenset(nodes) for name, nodes in readers.items()}


def _token_fields(plan: Plan) -> set[str]:
    """Every field with an entry a token: most of a batch's bytes."""
    carried = {name for name, unit in TRAJECTORY_FIELDS.items() if unit is Unit.TOKEN}
    fields = {f"{stream.name}/{name}" for stream in plan.graph.streams for name in carried}
    made = {
        f"{node.stream}/{returned.field}"
        for node in plan.graph.nodes
        for returned in node.spec.returns
        if returned.unit is Unit.TOKEN
    }
    return fields | made
