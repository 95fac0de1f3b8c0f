"""`hflow run`: makes the run's directory, starts the workers, runs the plan, says how it ended."""

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
from hflow.launch.lockfile import document
from hflow.launch.observer import RunObserver
from hflow.launch.preflight import check_models
from hflow.launch.shown_metrics import builtin_metrics
from hflow.launch.unsupported import refuse_unrunnable
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
    """What a run is carried out with; the defaults are those of `hflow run`."""

    factories: Mapping[str, Callable[..., Any]] = field(default_factory=factories)
    """Backend name -> what builds it."""
    processes: RayActors | None = None
    """Worker processes of several runs; None: the run starts its own."""
    is_quiet: bool = False
    """Whether nothing is shown while it runs."""


def run_compiled(compiled: Compiled, live: bool | None, means: RunEnvironment | None = None) -> RunSummary:
    """Run a compiled recipe to its end.

    Args:
        compiled: graph, bodies, configuration and plan.
        live: a live panel (True), plain lines (False), or what fits the terminal (None).
        means: what to carry it out with.

    Raises:
        HflowError: for anything that a user can mend, before or during the run.
    """
    refuse_unrunnable(compiled)
    return asyncio.run(_run(compiled, live, means or RunEnvironment()))


async def _run(compiled: Compiled, live: bool | None, means: RunEnvironment) -> RunSummary:
    """Check the data and the models, then begin: what fails early leaves no run directory."""
    rows, setup = open_rows(compiled), make_setup(compiled, means.factories)
    workers = make_workers(compiled, means.processes)
    check_models(compiled, setup)
    directory = _begin(compiled)
    setup = replace(setup, weights_directory=str(directory.weights.resolve()))
    console = Console(quiet=True) if means.is_quiet else None
    opened = open_display(compiled.config.name, live, console)
    with opened as display, _observer(compiled, directory, display) as seen:
        display.note(f"{compiled.config.name}: plan {compiled.plan.digest[:12]}, results in {directory.path}")
        async with _started(workers, setup):
            summary = await _execute(compiled, workers, rows, directory, seen, display)
    directory.write_summary(summary.to_json())
    return summary


async def _execute(
    compiled: Compiled,
    workers: Workers,
    rows: dict[str, DatasetRows],
    directory: RunDirectory,
    seen: RunObserver,
    display: Display,
) -> RunSummary:
    saved = saved_models(compiled.graph)
    checkpoints = Checkpoints(directory.checkpoints, saved)
    with Ledger(directory.ledger, make_header(compiled.plan)) as ledger:
        executor = Executor(compiled.plan, workers, rows, seen, checkpoints, ledger, compiled.config.seed)
        start = time.monotonic()
        with _interrupts(executor.stop, display):
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
        values=dict(seen.shown),
    )


def _begin(compiled: Compiled) -> RunDirectory:
    directory = RunDirectory.create(compiled.config.out, compiled.config.name)
    directory.config.write_text(to_yaml(compiled.config), encoding="utf-8")
    directory.plan.write_text(document(compiled) + "\n", encoding="utf-8")
    return directory


@contextmanager
def _observer(compiled: Compiled, directory: RunDirectory, display: Display) -> Iterator[RunObserver]:
    trace = Trace()
    with closing(MetricsLog(directory.metrics, directory.tensorboard, builtin_metrics())) as log:
        try:
            yield RunObserver(compiled.plan, log, trace, display, compiled.config.report.show)
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
def _interrupts(stop: Callable[[], None], display: Display) -> Iterator[None]:
    """The first Ctrl-C lets the run end by itself; the second takes the usual course."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        display.note("stopping: what runs finishes and is saved; press Ctrl-C again to end at once")
        stop()

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
