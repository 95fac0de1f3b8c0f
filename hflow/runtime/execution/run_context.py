"""`RunContext`: what all parts of the executor work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from hflow.data_plane.group_placement import GroupPlacer
from hflow.planner.plan.rows import Plan
from hflow.runtime.ledger import Ledger
from hflow.runtime.records.activity import OngoingWork
from hflow.runtime.records.step_metrics import RunEvents, StepMetrics
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.workers.interface import Workers


@dataclass(frozen=True)
class RunContext:
    """One run: its plan, its workers, and what keeps count of it."""

    plan: Plan
    workers: Workers
    """Workers that have been started with this plan."""
    observer: RunEvents
    """Receives metrics, spans and warnings."""
    checkpoints: Checkpoints
    """The directory that the run is saved to."""
    ledger: Ledger
    """Records what happens to each sample."""
    seed: int
    metrics: StepMetrics
    """The rows of the steps in progress."""
    placer: GroupPlacer
    """Knows the worker of each group and the load of each engine."""

    @classmethod
    def begin(
        cls,
        plan: Plan,
        workers: Workers,
        observer: RunEvents,
        checkpoints: Checkpoints,
        ledger: Ledger,
        seed: int,
        more_values: Callable[[], Mapping[str, float]] = dict,
    ) -> RunContext:
        """Return the context of a run that has counted and placed nothing yet.

        `more_values` returns what rows of metrics have besides what `StepMetrics` counts.
        """
        placer, metrics = GroupPlacer(plan), StepMetrics(plan, more_values)
        return cls(plan, workers, observer, checkpoints, ledger, seed, metrics, placer)

    @contextmanager
    def working(self, work: OngoingWork) -> Iterator[None]:
        """Report that workers do something while the context lasts."""
        self.observer.on_begin(work)
        try:
            yield
        finally:
            self.observer.on_finish(work)
