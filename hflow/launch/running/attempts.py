"""`Attempts`: starts workers and executes a plan, again from the last checkpoint when a worker fails."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.base.garbage import freeze_gc
from hflow.launch.planning.compile import Compiled
from hflow.launch.running.resume import newest_point, resumed_setup, rewind_run
from hflow.launch.running.stop_signals import StopSignals
from hflow.launch.running.worker_setup import make_workers
from hflow.runtime.execution.executor import Executor
from hflow.runtime.execution.row_cursor import DatasetRows
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.ledger import Ledger, make_header
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.records.trace import CONTROLLER
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.runtime.saving.saved_run import ResumePoint
from hflow.services.server import LimitServer
from hflow.workers.interface import Span, Workers, WorkerSetup

if TYPE_CHECKING:
    from hflow.launch.running.run_observer import RunObserver
    from hflow.workers.ray.ray_actors import RayActors


@dataclass
class Attempts:
    """Runs a plan, from the last checkpoint again after a worker has failed."""

    compiled: Compiled
    processes: RayActors | None
    """The processes of the workers; None: they are in this process."""
    setup: WorkerSetup
    """The setup of a run that begins."""
    rows: dict[str, DatasetRows]
    directory: RunDirectory
    observer: RunObserver
    checkpoints: Checkpoints
    signals: StopSignals
    note: Callable[[str], None]
    """Shows a line to the user."""
    services: LimitServer | None = None
    """The limits of remote services; None: there are none."""

    async def run(self, point: ResumePoint | None) -> RunSummary:
        """Run to the end, beginning at a checkpoint, or until a signal asks to stop.

        Raises:
            HflowError: for an error of the run, which is then in its directory.
            WorkerFailureError: when workers have failed more often than the configuration allows.
        """
        try:
            return await self._run_until_done(point)
        except asyncio.CancelledError:
            if not self.signals.is_requested:
                raise
            return self._stopped_early()
        except HflowError as error:
            self.directory.write_error(str(error))
            if self.checkpoints.last is not None or isinstance(error, RunError):  # else it would fail again
                self.note(self._resume_hint())
            raise
        finally:
            self.signals.remove()
            self.checkpoints.drop_unfinished()

    async def _run_until_done(self, point: ResumePoint | None) -> RunSummary:
        num_restarts = 0
        while True:
            workers = make_workers(self.processes)
            setup = resumed_setup(self.setup, self.compiled, point) if point else self.setup
            self.signals.stop_by(None)
            try:
                async with _started(workers, setup, self.observer):
                    return await self._execute(workers, point)
            except WorkerFailureError as failure:
                if self.signals.is_requested:  # it may have reached the workers too
                    self.observer.on_warning(f"{failure}; the run was being stopped and is not saved again")
                    return self._stopped_early()
                newest = newest_point(self.checkpoints)
                has_progressed = newest is not None and (point is None or newest.steps > point.steps)
                num_restarts = 1 if has_progressed else num_restarts + 1
                if num_restarts > self.compiled.config.faults.max_restarts or not self._can_restart:
                    raise
                point = newest
                self.signals.stop_by(None)
                await self._restart(failure, point, num_restarts)

    @property
    def _can_restart(self) -> bool:
        """Whether failed processes can be replaced."""
        return self.processes is not None and not self.processes.is_shared

    async def _restart(self, failure: WorkerFailureError, point: ResumePoint | None, number: int) -> None:
        """Say what happened, take the run back to a checkpoint, and wait a little."""
        steps, most = point.steps if point else 0, self.compiled.config.faults.max_restarts
        self.observer.on_warning(
            f"{failure}; the run continues after step {steps} (restart {number} of {most})"
        )
        start = time.time()
        self.checkpoints.drop_unfinished()
        rewind_run(self.directory, point)
        self.observer.on_rewind(steps)
        await asyncio.sleep(min(60.0, 0.5 * 2**number))
        self.observer.on_span(CONTROLLER, Span("restart", "faults", start, time.time(), {"step": steps}))

    async def _execute(self, workers: Workers, point: ResumePoint | None) -> RunSummary:
        compiled, config = self.compiled, self.compiled.config
        if not self.directory.ledger.is_file():  # the run begins, and not before its workers are ready
            self.directory.link_latest()
        with Ledger(self.directory.ledger, make_header(compiled.plan)) as ledger:
            run = RunContext.begin(
                compiled.plan,
                workers,
                self.observer,
                self.checkpoints,
                ledger,
                config.seed,
                dict if self.services is None else self.services.row_values,
            )
            executor = Executor(
                run,
                self.rows,
                point,
                60 * config.save_minutes or None,
                config.report.samples,
                config.faults.max_restarts,
            )
            start = time.monotonic()
            self.signals.stop_by(executor.stop)
            if self.services is not None:
                self.services.stop_by(executor.stop)
            outcome = await executor.run()
            seconds = time.monotonic() - start
            samples = ledger.close(outcome.reason)
        self.observer.close(outcome.reason)  # what it warns of is in the summary
        return RunSummary(
            name=config.name,
            directory=self.directory.path,
            steps=outcome.steps,
            seconds=seconds,
            reason=outcome.reason,
            plan_digest=compiled.plan.digest,
            sample_ends=samples,
            values=dict(self.observer.shown),
            not_evaluated=self.observer.not_evaluated,
            warnings=tuple(self.observer.warnings),
        )

    def _resume_hint(self) -> str:
        """Return the step that is safe, and the command that continues from there."""
        last = self.checkpoints.last
        saved = "nothing is saved yet" if last is None else f"step {last} is saved"
        command = f"hflow run --resume {self.directory.path}"
        if not self.compiled.recipe.is_file():
            command = f"hflow.resume({str(self.directory.path)!r}, recipe=recipe)"
        return f"{saved}; to continue: {command}"

    def _stopped_early(self) -> RunSummary:
        """Return the summary of a run that was stopped while its workers started."""
        return RunSummary(
            name=self.compiled.config.name,
            directory=self.directory.path,
            steps=self.checkpoints.last or 0,
            seconds=0.0,
            reason="stopped",
            plan_digest=self.compiled.plan.digest,
            sample_ends={},
        )


@asynccontextmanager
async def _started(workers: Workers, setup: WorkerSetup, observer: RunObserver) -> AsyncIterator[None]:
    start = time.monotonic()
    directories = [path for path in (setup.weights_directory, setup.sample_log_directory) if path]
    try:
        _remove(directories)  # a controller that was killed may have left files
        await workers.start(setup, observer.on_progress, observer.wait_for)
        freeze_gc()
        observer.on_progress(
            f"workers are ready after {time.monotonic() - start:.0f} s; generating the first samples"
        )
        yield
    finally:
        with observer.wait_for("workers to end"):
            await workers.close()
        _remove(directories)


def _remove(directories: Sequence[str]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
