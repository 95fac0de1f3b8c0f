"""`hflow run`: creates the run's directory, starts workers, runs the plan, and returns a summary."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from hflow.config import to_yaml
from hflow.launch.compile import Compiled
from hflow.launch.observer import RunObserver
from hflow.launch.plan_file import plan_file_text
from hflow.launch.preflight import check_models, refuse_unrunnable
from hflow.launch.shown_metrics import builtin_metrics
from hflow.launch.worker_setup import make_setup, make_workers, open_rows
from hflow.planner.backends import factories
from hflow.planner.graph_queries import saved_models
from hflow.report.live import Display, open_display
from hflow.report.summary import RunSummary
from hflow.runtime.execution.checkpoint import Checkpoints
from hflow.runtime.execution.executor import Executor
from hflow.runtime.execution.metrics_log import MetricsLog
from hflow.runtime.execution.row_cursor import DatasetRows
from hflow.runtime.execution.run_directory import RunDirectory
from hflow.runtime.execution.trace import Trace
from hflow.runtime.ledger import Ledger, make_header
from hflow.workers.interface import Workers, WorkerSetup
from hflow.workers.process_setup import freeze_gc

if TYPE_CHECKING:
    from hflow.workers.ray.ray_actors import RayActors


@dataclass(frozen=True)
class RunEnvironment:
    """Factories and processes that a run uses. The defaults are those of `hflow run`."""

    factories: Mapping[str, Callable[..., Any]] = field(default_factory=factories)
    """Name of a backend or engine -> the function that builds it."""
    processes: RayActors | None = None
    """Worker processes shared by several runs; None: the run starts its own."""
    is_quiet: bool = False
    """Show nothing while it runs."""


def run_compiled(
    compiled: Compiled, live: bool | None, environment: RunEnvironment | None = None
) -> RunSummary:
    """Run a compiled recipe.

    Args:
        compiled: graph, bodies, configuration and plan.
        live: show a live panel (True) or plain lines (False); None: a panel if the output is a terminal.
        environment: factories and processes to use; None: those of `hflow run`.

    Raises:
        HflowError: for any error that a user can fix, before or during the run.
    """
    refuse_unrunnable(compiled)
    return asyncio.run(_run(compiled, live, environment or RunEnvironment()))


async def _run(compiled: Compiled, live: bool | None, environment: RunEnvironment) -> RunSummary:
    """Check data and models before the run's directory is created, so that early errors leave none."""
    rows, setup = open_rows(compiled), make_setup(compiled, environment.factories)
    workers = make_workers(compiled, environment.processes)
    check_models(compiled, setup)
    directory = _create_directory(compiled)
    setup = replace(setup, weights_directory=str(directory.weights.resolve()))
    console = Console(quiet=True) if environment.is_quiet else None
    opened = open_display(compiled.config.name, live, console)
    with opened as display, _observer(compiled, directory, display) as observer:
        display.note(f"{compiled.config.name}: plan {compiled.plan.digest[:12]}, results in {directory.path}")
        async with _started(workers, setup):
            summary = await _execute(compiled, workers, rows, directory, observer, display)
    directory.write_summary(summary.to_json())
    return summary


async def _execute(
    compiled: Compiled,
    workers: Workers,
    rows: dict[str, DatasetRows],
    directory: RunDirectory,
    observer: RunObserver,
    display: Display,
) -> RunSummary:
    saved = saved_models(compiled.graph)
    checkpoints = Checkpoints(directory.checkpoints, saved)
    with Ledger(directory.ledger, make_header(compiled.plan)) as ledger:
        executor = Executor(compiled.plan, workers, rows, observer, checkpoints, ledger, compiled.config.seed)
        start = time.monotonic()
        with _stop_on_interrupt(executor.stop, display):
            outcome = await executor.run()
        seconds = time.monotonic() - start
        if outcome.steps and checkpoints.last != outcome.steps:
            for model in saved:
                await executor.save(model, outcome.steps)
        samples = ledger.close(outcome.reason)
    return RunSummary(
        name=compiled.config.name,
        directory=directory.path,
        steps=outcome.steps,
        seconds=seconds,
        reason=outcome.reason,
        plan_digest=compiled.plan.digest,
        samples=samples,
        values=dict(observer.shown),
        warnings=tuple(observer.warnings),
    )


def _create_directory(compiled: Compiled) -> RunDirectory:
    directory = RunDirectory.create(compiled.config.out, compiled.config.name)
    directory.config.write_text(to_yaml(compiled.config), encoding="utf-8")
    directory.plan.write_text(plan_file_text(compiled) + "\n", encoding="utf-8")
    return directory


@contextmanager
def _observer(compiled: Compiled, directory: RunDirectory, display: Display) -> Iterator[RunObserver]:
    trace = Trace()
    with closing(MetricsLog(directory.metrics, directory.tensorboard, builtin_metrics())) as log:
        try:
            yield RunObserver(compiled.plan, log, trace, display, compiled.config.report)
        finally:
            trace.write(directory.trace)


@asynccontextmanager
async def _started(workers: Workers, setup: WorkerSetup) -> AsyncIterator[None]:
    try:
        await workers.start(setup)
        freeze_gc()
        yield
    finally:
        await workers.close()
        # A worker that died may have left files.
        shutil.rmtree(setup.weights_directory, ignore_errors=True)


@contextmanager
def _stop_on_interrupt(stop: Callable[[], None], display: Display) -> Iterator[None]:
    """Stop gracefully at the first Ctrl-C; the second raises KeyboardInterrupt as usual."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        display.note("stopping: running work finishes and is saved; press Ctrl-C again to stop at once")
        stop()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
