"""`NodeExecution` runs one node on a set of samples: it moves the inputs, runs the node, records the outputs.

Invariant: when `run` returns, `DataLocations` knows every copy of the inputs that was made, and where
the outputs are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from hflow.data_plane.locations import DataLocations
from hflow.data_plane.minibatches import shards
from hflow.data_plane.redistribute import Shards, redistribute
from hflow.graph.ir import Level
from hflow.planner.plan.rows import Plan
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.records.activity import DEVICE, OngoingWork
from hflow.workers.interface import NodeResult, NodeTask, ShardInput


@dataclass(frozen=True)
class StepBatch:
    """The samples of one batch, in ascending order."""

    stream: str
    step: int
    samples: tuple[int, ...]
    groups: tuple[int, ...]
    """The groups of the samples, in ascending order."""
    group_size: int
    num_refused: int | None = None
    """Samples that the evaluation has refused; None: no evaluation of the stream has refused one."""

    @cached_property
    def members(self) -> Mapping[int, Sequence[int]]:
        """Group -> its samples."""
        members: dict[int, list[int]] = {group: [] for group in self.groups}
        for sample in self.samples:
            members[sample // self.group_size].append(sample)
        return members


@dataclass(frozen=True)
class ExecutionResult:
    """What running a node returned."""

    results: Sequence[NodeResult]
    """One from each worker."""
    moved_bytes: int | None
    """Bytes of the inputs that moved between workers; None where all were in place."""


class NodeExecution:
    """Runs nodes on workers.

    Args:
        states: node -> JSON of its `State` before its first call in this run.

    Attributes:
        states: node -> JSON of its `State`.
    """

    def __init__(self, run: RunContext, states: Mapping[str, str]) -> None:
        self._run = run
        self.states = dict(states)
        self._rules = {rule.consumer: rule for rule in run.plan.rules}
        self._cuts = dict(run.plan.cuts)
        self._cutting = asyncio.Lock()
        """Nodes that fire together cut their samples in turn. The event loop does other work between."""
        self._warned: set[str] = set()
        """Nodes that have skipped an update."""

    async def run(
        self, node: str, step: int, groups: Mapping[int, Sequence[int]], locations: DataLocations
    ) -> ExecutionResult:
        """Run a node on groups (group -> its samples), and update the locations of their data.

        For a node that runs as samples arrive, `step` is the number of its runs before.
        """
        rule = self._rules[node]
        async with self._cutting:
            samples = [sample for members in groups.values() for sample in members]
            holders = locations.holders(rule.fields, samples)
            cut = self._cuts.get(node)
            assignment = shards(rule, cut, groups, holders, seed=self._run.seed, step=step)
            moves = redistribute(rule, assignment, holders, self._run.plan.cluster)
            await asyncio.sleep(0)
        tasks = node_tasks(node, step, rule.heads, self._replica_workers(node), assignment)
        transfer = self._run.workers.transfer(moves) if len(moves.samples) else _nothing()
        with self._run.working(OngoingWork(node, DEVICE, tuple(tasks), time.time(), step + 1)):
            if not self._run.workers.replaceable.keys().isdisjoint(moves.sources):
                # The source may fail meanwhile. The node must not run then before the moves are done again.
                moved_bytes = await transfer
                results = await self._run.workers.run(tasks)
            else:
                moved_bytes, results = await asyncio.gather(transfer, self._run.workers.run(tasks))
        locations.add_moves(moves)
        self._record(node, locations, results)
        return ExecutionResult(results, moved_bytes)

    def output_fields(self, node: str) -> tuple[str, ...]:
        """Return the fields that a node makes, as `stream/field`."""
        return output_fields(self._run.plan, node)

    def _replica_workers(self, node: str) -> tuple[int, ...]:
        """Return all workers of the replica that a node runs on; empty for a node without a model."""
        replicas = self._run.plan.placement(node).replicas
        return self._run.plan.replica(replicas[0]).workers if replicas else ()

    def _record(self, node: str, locations: DataLocations, results: Sequence[NodeResult]) -> None:
        fields = self.output_fields(node)
        uses_devices = bool(self._run.plan.placement(node).replicas)
        made = chain.from_iterable(result.samples for result in results)
        makers = np.repeat([result.worker for result in results], [len(result.samples) for result in results])
        locations.add_outputs(fields, made, makers)
        for result in results:
            self._run.ledger.record_result(result)
            if result.state is not None:
                self.states[node] = result.state
            if result.skipped and node not in self._warned:
                self._warned.add(node)
                self._run.observer.on_warning(
                    f"{node} skipped an update of step {result.step + 1}, as its gradient was not finite; "
                    "hflow samples RUN --where \"reason = 'nonfinite'\" lists the samples of all such updates"
                )
            self._run.observer.on_span(result.worker, result.span)
            if uses_devices:
                self._run.metrics.add_device_seconds(result.worker, result.span.end - result.span.start)


def output_fields(plan: Plan, node: str) -> tuple[str, ...]:
    """Return the fields that a node makes, as `stream/field`."""
    graph_node = plan.graph.node(node)
    return tuple(f"{graph_node.stream}/{returned.field}" for returned in graph_node.spec.returns)


def streamed_outputs(plan: Plan) -> dict[str, tuple[str, ...]]:
    """Return the fields of each node that runs on samples or groups, as they arrive."""
    nodes = (node.name for node in plan.schedule.nodes if node.level is not Level.BATCH)
    return {name: output_fields(plan, name) for name in nodes}


def node_tasks(
    node: str, step: int, dp_heads: tuple[int, ...], workers: tuple[int, ...], assignment: Shards
) -> dict[int, NodeTask]:
    """Return one task per worker, with the shards that the plan assigns to it.

    Those of the replica's workers that are not dp-heads get a task without a shard.
    """
    inputs: dict[int, list[ShardInput]] = {worker: [] for worker in workers}
    for dp, (dp_head, minibatches) in enumerate(zip(dp_heads, assignment, strict=True)):
        inputs.setdefault(dp_head, []).append(ShardInput(dp, minibatches))
    return {worker: NodeTask(node, step, tuple(shard_inputs)) for worker, shard_inputs in inputs.items()}


async def _nothing() -> None:
    return None
