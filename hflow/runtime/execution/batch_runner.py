"""`BatchRunner` runs the batch nodes of formed batches, averages their fields, and frees their data.

Invariant: a batch's data stays on the workers until the last node that reads it in the step is done. A
field with an entry per token is freed right after its last reader, everything else at the end of the step.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from math import fsum

from hflow.data_plane.locations import DataLocations
from hflow.graph.ir import TRAJECTORY_FIELDS, Level
from hflow.graph.queries import reported_field
from hflow.metrics import declare, declared, find_metric
from hflow.planner.plan.rows import EdgeRule, Plan
from hflow.runtime.execution.node_execution import NodeExecution, StepBatch, output_fields
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.records.sample_texts import SampleTextLog
from hflow.runtime.records.step_metrics import (
    BATCH_SAMPLES,
    BATCH_TOKENS,
    EVALUATION_REFUSED,
    NUM_EVALUATED,
    average_fields,
)
from hflow.runtime.state.rules import node_fires
from hflow.types import Unit
from hflow.types.recorded import requestable_kinds
from hflow.workers.interface import NodeResult, Workers

MOVED_BYTES = declare(
    "{node}/moved_bytes", "bytes", "bytes of the node's inputs that moved between workers, if any did"
)


class BatchRunner:
    """Runs the batches of all streams.

    Args:
        num_texts: samples of each batch whose text the observer receives.
        num_reported: completed steps whose metrics were reported, by a run that continues.
    """

    def __init__(
        self,
        run: RunContext,
        node_execution: NodeExecution,
        release: SampleRelease,
        num_texts: int = 0,
        num_reported: int = 0,
    ) -> None:
        self._run = run
        self._node_execution = node_execution
        self._sample_release = release
        self.texts = SampleTextLog(run.workers, run.observer, num_texts)
        plan = run.plan
        self._num_steps = plan.schedule.num_steps
        self._nodes = {node.name: node for node in plan.schedule.nodes}
        self._rules = {rule.consumer: rule for rule in _batch_rules(plan)}
        self._roots = {name: plan.graph.root_stream(rule.stream).name for name, rule in self._rules.items()}
        self._side_streams = frozenset(
            stream.name for stream in plan.schedule.streams if stream.batch is None
        )
        self._readers = _token_field_readers(plan)
        self._made_by_batch = _fields_of_batch_nodes(plan)
        self._fields = _fields_of_streams(plan)
        self._batches: dict[tuple[str, int], StepBatch] = {}
        self._done: dict[int, set[str]] = defaultdict(set)
        """Step -> batch nodes that are done."""
        self.locations = {stream.name: DataLocations() for stream in plan.schedule.streams}
        self._num_reported = num_reported
        self._held: list[tuple[int, Mapping[str, float]]] = []
        """Version and metrics of evaluations whose step is not reported yet."""

    def add_batch(self, batch: StepBatch) -> None:
        """Keep a batch until its step is done."""
        self._batches[batch.stream, batch.step] = batch
        self.texts.add_batch(batch)

    async def summarize(self, batch: StepBatch, is_evaluation: bool) -> None:
        """Average the numeric fields of a batch. An evaluation without batch nodes ends here."""
        samples_of = self.locations[batch.stream].by_home(batch.samples)
        means, _ = await asyncio.gather(
            self._average(batch.stream, samples_of.items()),
            self.texts.read(batch, self.locations[batch.stream]),
        )
        not_made_yet = frozenset().union(*self._made_by_batch.values())
        values = {name: mean for name, mean in means.items() if _without_metric(name) not in not_made_yet}
        if is_evaluation:
            if batch.num_refused is not None:
                values[EVALUATION_REFUSED.member(batch.stream)] = float(batch.num_refused)
                values[NUM_EVALUATED.member(batch.stream)] = float(len(batch.samples))
            self._report_evaluation(batch.step, values)
            if batch.stream not in self._roots.values():
                await self._release(batch)
            return
        lengths = self.locations[batch.stream].lengths(batch.samples)
        values[BATCH_SAMPLES.name] = float(len(lengths))
        values[BATCH_TOKENS.name] = float(sum(lengths))
        self._run.metrics.add_values(batch.step, values)

    def step_reported(self, num_steps: int) -> None:
        """Report evaluations of the weights after `num_steps` steps, whose metrics were just reported."""
        self._num_reported = num_steps
        held, self._held = self._held, []
        for version, values in held:
            self._report_evaluation(version, values)

    def _report_evaluation(self, version: int, values: Mapping[str, float]) -> None:
        """Report an evaluation, but not before the step that its weights come from."""
        if version > self._num_reported:
            self._held.append((version, values))
        else:
            self._run.observer.on_evaluation(version, values)

    async def run_node(self, node: str, step: int) -> None:
        """Run a batch node on its batch and report what it measured."""
        batch = self._batches[self._roots[node], step]
        done = await self._node_execution.run(node, step, batch.members, self.locations[batch.stream])
        if done.moved_bytes is not None:
            self._report(node, step, {MOVED_BYTES.member(node): float(done.moved_bytes)})
        for result in done.results:
            self._report(node, step, {f"{node}/{name}": value for name, value in result.metrics.items()})
        if self._roots[node] not in self._side_streams:
            lengths = self.locations[batch.stream].lengths(batch.samples)
            self._run.metrics.add_values(
                step, self._run.metrics.devices.batch_node(node, done.results, lengths)
            )
        await self._summarize_outputs(node, step, done.results)

    async def free_token_fields(self, node: str, step: int) -> None:
        """Free the fields with an entry per token that no node reads after this one in its step.

        Which fields these are is decided before the first await, so that the run may continue meanwhile.
        The last node of a batch leaves everything to `close_step`.
        """
        batch = self._batches[self._roots[node], step]
        done = self._done[step]
        done.add(node)
        nodes = [name for name, root in self._roots.items() if root == batch.stream]
        if self._firing_at(nodes, step) <= done:
            return
        fields = [
            name
            for name in self._rules[node].fields
            if name in self._readers and self._firing_at(self._readers[name], step) <= done
        ]
        if not fields:
            return
        samples_of = self.locations[batch.stream].drop_fields(fields, batch.samples)
        await self.texts.wait_until_read(batch)
        await asyncio.gather(
            *(
                self._sample_release.release(worker, samples, batch.stream, fields)
                for worker, samples in samples_of.items()
            )
        )

    async def close_step(self, step: int) -> None:
        """Free all remaining data of a step's batches."""
        self._done.pop(step, None)
        for batch in [batch for (_, at), batch in self._batches.items() if at == step]:
            await self._release(batch)
        self.texts.report_refused(step)

    async def _summarize_outputs(self, node: str, step: int, results: Sequence[NodeResult]) -> None:
        """Average what a batch node gave to samples.

        For a body of samples or groups that runs per batch these are all its numeric fields, as in
        `summarize`; for other batch nodes only the number that they report for each sample.
        """
        graph_node = self._run.plan.graph.node(node)
        if graph_node.spec.verb != "compute" or graph_node.spec.level is Level.BATCH:
            if numbers := [number for result in results for number in result.values]:
                name = f"{graph_node.stream}/{reported_field(self._run.plan.graph, node)}"
                self._report(node, step, {name: fsum(numbers) / len(numbers)})
            return
        means = await self._average(graph_node.stream, ((r.worker, r.samples) for r in results))
        made = self._made_by_batch[node]
        self._report(node, step, {name: x for name, x in means.items() if _without_metric(name) in made})

    async def _average(
        self, stream: str, samples_of: Iterable[tuple[int, Sequence[int]]]
    ) -> dict[str, float]:
        """Return the means of numeric fields over samples, given as (worker, samples)."""
        means = average_fields(
            await asyncio.gather(
                *(self._run.workers.summarize(worker, stream, samples) for worker, samples in samples_of)
            )
        )
        return {_shorten(name, self._fields): mean for name, mean in means.items()}

    def _report(self, node: str, step: int, values: Mapping[str, float]) -> None:
        """Report what a node measured: for a step, or for the version that a side stream evaluates."""
        if self._roots[node] not in self._side_streams:
            self._run.metrics.add_values(step, values)
        elif values:
            self._report_evaluation(step, values)

    def _firing_at(self, nodes: Iterable[str], step: int) -> set[str]:
        """Return those nodes that fire at a step."""
        return {name for name in nodes if node_fires(self._nodes[name], step, self._num_steps)}

    async def _release(self, batch: StepBatch) -> None:
        locations = self.locations[batch.stream]
        is_trained = batch.stream not in self._side_streams
        await self.texts.finish(batch, locations, is_trained=is_trained)
        samples_of = locations.workers_of(batch.samples)
        locations.forget(batch.samples)
        del self._batches[batch.stream, batch.step]
        await asyncio.gather(
            *(
                self._sample_release.release(worker, samples, batch.stream, None)
                for worker, samples in samples_of.items()
            )
        )


def _shorten(name: str, fields: Container[str]) -> str:
    """Return `node/metric` for a metric `node/node.metric` of the node that a stream is named after.

    Other names are returned as they are, and so is a metric with the name of a field or of hflow's own.
    """
    stream, _, metric = name.partition("/")
    if not metric.startswith(f"{stream}."):
        return name
    short = f"{stream}/{metric.removeprefix(f'{stream}.')}"
    return name if short in fields or find_metric(short, declared()) is not None else short


def _without_metric(name: str) -> str:
    """Return `stream/node` of a metric `stream/node.metric`, and other names as they are."""
    return name.partition(".")[0]


def _batch_rules(plan: Plan) -> tuple[EdgeRule, ...]:
    """Return the rules of batch nodes."""
    levels = {node.name: node.level for node in plan.schedule.nodes}
    return tuple(rule for rule in plan.rules if levels[rule.consumer] is Level.BATCH)


def _fields_of_batch_nodes(plan: Plan) -> dict[str, frozenset[str]]:
    """Return, for each batch node, the fields and metrics that do not exist before it has run."""
    nodes = [plan.graph.node(rule.consumer) for rule in _batch_rules(plan) if rule.fields]
    return {
        node.name: frozenset((*output_fields(plan, node.name), f"{node.stream}/{node.name}"))
        for node in nodes
    }


def _fields_of_streams(plan: Plan) -> frozenset[str]:
    """Return the fields that samples of each stream may have, as `stream/field`."""
    graph = plan.graph
    columns = {dataset.name: dict(dataset.columns) for dataset in graph.datasets}
    from_sources = {
        f"{stream.name}/{field}"
        for stream in graph.streams
        for field in (*TRAJECTORY_FIELDS, "truncated", *columns.get(stream.dataset or "", ()))
    }
    return frozenset(from_sources.union(*(output_fields(plan, node.name) for node in graph.nodes)))


def _token_field_readers(plan: Plan) -> dict[str, frozenset[str]]:
    """Return, for each field of a trained stream with an entry per token, the batch nodes that read it."""
    trained = {stream.name for stream in plan.schedule.streams if stream.batch is not None}
    token_fields = _token_fields(plan)
    readers: dict[str, set[str]] = defaultdict(set)
    for rule in _batch_rules(plan):
        if plan.graph.root_stream(rule.stream).name in trained:
            for name in token_fields.intersection(rule.fields):
                readers[name].add(rule.consumer)
    return {name: frozenset(nodes) for name, nodes in readers.items()}


def _token_fields(plan: Plan) -> set[str]:
    """Return every field with an entry per token. They are most of a batch's bytes."""
    units = {**TRAJECTORY_FIELDS, **{kind.name: kind.unit for kind in requestable_kinds()}}
    from_source = {name for name, unit in units.items() if unit is Unit.TOKEN}
    fields = {f"{stream.name}/{name}" for stream in plan.graph.streams for name in from_source}
    from_nodes = {
        f"{node.stream}/{returned.field}"
        for node in plan.graph.nodes
        for returned in node.spec.returns
        if returned.unit is Unit.TOKEN
    }
    return fields | from_nodes


class SampleRelease:
    """Frees the data of samples on workers, and waits while a checkpoint copies it."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._is_allowed = asyncio.Event()
        self._is_allowed.set()

    def hold(self) -> None:
        """Free nothing until `go_on` is called."""
        self._is_allowed.clear()

    def go_on(self) -> None:
        """Free what had to wait."""
        self._is_allowed.set()

    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """Free fields of samples on a worker; see `Workers.release`."""
        await self._is_allowed.wait()
        await self._workers.release(worker, samples, stream, fields)
