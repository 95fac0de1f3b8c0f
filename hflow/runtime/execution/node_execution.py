"""One firing of a node on samples: its inputs move by the plan's rule, it runs, and its outputs are noted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hflow.planner.data.data_locations import DataLocations
from hflow.planner.data.minibatches import shards
from hflow.planner.data.redistribute import Shards, redistribute
from hflow.planner.ir import Plan
from hflow.runtime.execution.step_metrics import Observer, StepMetrics
from hflow.runtime.ledger import Ledger
from hflow.workers.interface import ComputeOrder, GroupOrder, NodeResult, NodeTask, ShardInput, Workers

# -------------------- What the executor asks of each worker, sent as one message each.


class WorkerMessages:
    """What one round of instructions asks of each worker."""

    def __init__(self) -> None:
        self.groups: dict[int, list[GroupOrder]] = defaultdict(list)
        self.computes: dict[int, list[ComputeOrder]] = defaultdict(list)


def node_tasks(
    node: str, step: int, heads: tuple[int, ...], workers: tuple[int, ...], assignment: Shards
) -> dict[int, NodeTask]:
    """One task a worker, with the shards that the plan maps onto it.

    Args:
        node: the node that fires.
        step: for this step.
        heads: dp index -> worker that is given its shard.
        workers: all workers of the node's replica; those that are no heads take part without a shard.
        assignment: dp index -> minibatches of samples.
    """
    inputs: dict[int, list[ShardInput]] = {worker: [] for worker in workers}
    for dp, (head, minibatches) in enumerate(zip(heads, assignment, strict=True)):
        inputs.setdefault(head, []).append(ShardInput(dp, minibatches))
    return {worker: NodeTask(node, step, tuple(held)) for worker, held in inputs.items()}


@dataclass(frozen=True)
class Fired:
    """What came of a firing."""

    results: Sequence[NodeResult]
    moved_bytes: int | None
    """Of its inputs; None where they lay in place."""


class NodeExecution:
    """Fires nodes.

    Args:
        plan: rules, cuts and replicas.
        workers: what runs them.
        observer: is given their spans.
        scores: are told how long devices worked.
        ledger: is told the numbers that they give to samples.
        seed: of the run, for cutting minibatches.
    """

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        observer: Observer,
        scores: StepMetrics,
        ledger: Ledger,
        seed: int,
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._observer = observer
        self._scores = scores
        self._ledger = ledger
        self._seed = seed
        self._rules = {rule.consumer: rule for rule in plan.rules}
        self._cuts = dict(plan.cuts)

    async def fire(
        self, node: str, step: int, groups: Mapping[int, Sequence[int]], holdings: DataLocations
    ) -> Fired:
        """Run a node on groups of samples.

        Args:
            node: which.
            step: for this step; of a node that runs as samples arrive, the number of the firing.
            groups: group -> its samples.
            holdings: who holds what of them.
        """
        rule = self._rules[node]
        samples = [sample for members in groups.values() for sample in members]
        holders = holdings.holders(rule.fields, samples)
        assignment = shards(
            rule,
            self._cuts.get(node),
            groups,
            holdings.lengths(samples),
            holders,
            seed=self._seed,
            step=step,
        )
        moves = redistribute(rule, assignment, holders, self._plan.cluster)
        moved, results = await asyncio.gather(
            self._workers.transfer(moves) if moves else _nothing(),
            self._workers.run(node_tasks(node, step, rule.heads, self._ranks(node), assignment)),
        )
        holdings.add_moves(moves)
        self._note(node, holdings, results)
        return Fired(results, moved)

    def outputs(self, node: str) -> tuple[str, ...]:
        """Fields that a node makes, as `stream/field`."""
        return outputs(self._plan, node)

    def _ranks(self, node: str) -> tuple[int, ...]:
        """All workers of the replica that a node runs on; none for a node without a model."""
        replicas = self._plan.placement(node).replicas
        return self._plan.replica(replicas[0]).workers if replicas else ()

    def _note(self, node: str, holdings: DataLocations, results: Sequence[NodeResult]) -> None:
        for result in results:
            holdings.add_outputs(outputs(self._plan, node), result.samples, result.worker)
            self._ledger.reported(result)
            self._observer.on_span(result.worker, result.span)
            if self._plan.placement(node).replicas:
                self._scores.ran(result.worker, result.span.end - result.span.start)


def outputs(plan: Plan, node: str) -> tuple[str, ...]:
    """Fields that a node makes, as `stream/field`."""
    found = plan.graph.node(node)
    return tuple(f"{found.stream}/{returned.field}" for returned in found.spec.returns)


async def _nothing() -> None:
    return None
