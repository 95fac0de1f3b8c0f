"""One firing of a node on samples: its inputs move by the plan's rule, it runs, and its outputs are noted."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hflow.plan.cut import shards
from hflow.plan.ir import Plan
from hflow.plan.redistribute import redistribute
from hflow.runtime.holdings import Holdings
from hflow.runtime.ledger import Ledger
from hflow.runtime.orders import node_tasks
from hflow.runtime.scoreboard import Observer, Scoreboard
from hflow.workers.base import NodeResult, Workers


@dataclass(frozen=True)
class Fired:
    """What came of a firing."""

    results: Sequence[NodeResult]
    moved_bytes: int | None
    """Of its inputs; None where they lay in place."""


class Firing:
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
        scores: Scoreboard,
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
        self, node: str, step: int, groups: Mapping[int, Sequence[int]], holdings: Holdings
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
        holders = holdings.of(rule.fields, samples)
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
        pulled: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for move in moves:
            pulled[move.dst, move.fields] += move.samples
        for (worker, fields), held in pulled.items():
            holdings.moved(fields, held, worker)
        self._note(node, holdings, results)
        return Fired(results, moved)

    def outputs(self, node: str) -> tuple[str, ...]:
        """Fields that a node makes, as `stream/field`."""
        return outputs(self._plan, node)

    def _ranks(self, node: str) -> tuple[int, ...]:
        """All workers of the replica that a node runs on; none for a node without a model."""
        replicas = self._plan.placement(node).replicas
        return self._plan.replica(replicas[0]).workers if replicas else ()

    def _note(self, node: str, holdings: Holdings, results: Sequence[NodeResult]) -> None:
        for result in results:
            holdings.made(outputs(self._plan, node), result.samples, result.worker)
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
