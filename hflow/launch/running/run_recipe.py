"""`hflow run`: creates the run's directory, starts workers, runs the plan, and returns a summary."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.base.files import WriteError, replace_text, resolved
from hflow.base.terminal import SafeConsole
from hflow.config import flatten, to_yaml
from hflow.graph.queries import saved_models
from hflow.launch.planning.compile import Compiled, compile_plan_file, compile_recipe, plan_file_text
from hflow.launch.running.inputs import run_inputs
from hflow.launch.running.observer_thread import ObserverThread
from hflow.launch.running.preflight import (
    check_determinism,
    check_faults,
    check_saving,
    check_variables,
    refuse_unrunnable,
)
from hflow.launch.running.resume import (
    ResumedRun,
    find_resumed,
    newest_point,
    resumed_setup,
    rewind_run,
)
from hflow.launch.running.shown_metrics import builtin_metrics
from hflow.launch.running.trackers import open_trackers
from hflow.launch.running.worker_setup import make_processes, make_setup, make_workers, open_rows
from hflow.observer import RunInfo
from hflow.planner.models.descriptors import factories
from hflow.report.text.live import Display, open_display
from hflow.report.text.summary import RunSummary
from hflow.runtime.execution.executor import Executor
from hflow.runtime.execution.row_cursor import DatasetRows
from hflow.runtime.execution.run_context import RunContext
from hflow.runtime.ledger import Ledger, make_header
from hflow.runtime.records.trace import CONTROLLER, Trace
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.runtime.saving.saved_run import ResumePoint
from hflow.workers.interface import Span, Workers, WorkerSetup
from hflow.workers.process_setup import freeze_gc

if TYPE_CHECKING:
    from hflow.launch.running.run_observer import RunObserver
    from hflow.workers.ray.ray_actors import RayActors


@dataclass(frozen=True)
class RunEnvironment:
    """Factories and processes that a run uses. The defaults are those of `hflow run`."""

    factories: Mapping[str, Callable[..., Any]] = field(default_factory=factories)
    """Name of a backend or engine -> the function that builds it."""
    processes: RayActors | None = None
    """Worker processes shared by several runs; None: the run starts its own."""
    is_quiet: bool = False
    """Show nothing while it runs, and report to no tracker or observer."""


def run(recipe: str | Path, overrides: Sequence[str] = (), live: bool | None = None) -> RunSummary:
    """Run a recipe.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        live: show a live panel (True) or plain lines (False); None: a panel if the output is a terminal.

    Raises:
        HflowError: for any error that a user can fix, before or during the run.
    """
    return run_compiled(compile_recipe(recipe, overrides), live)


def run_plan(
    file: str | Path,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    live: bool | None = None,
) -> RunSummary:
    """Run exactly the plan in a plan file or in the directory of an earlier run.

    Args:
        file: a file printed by `hflow plan RECIPE --json`, or a run's directory.
        recipe: the recipe's file, if it has moved; None: the stored path.
        overrides: configuration to change that does not change the plan, such as `out=elsewhere`.
        live: whether a panel shows progress, as for `run`.

    Raises:
        HflowError: for the reasons of `run`, and if the recipe's plan differs from the stored one.
    """
    return run_compiled(compile_plan_file(file, recipe, overrides), live)


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
    return _run(compiled, live, environment or RunEnvironment(), None)


def resume(
    run: str | Path,
    overrides: Sequence[str] = (),
    live: bool | None = None,
    environment: RunEnvironment | None = None,
) -> RunSummary:
    """Continue a run from its last checkpoint, in its own directory.

    Args:
        run: a run's directory, NAME for the latest run in `runs/NAME`, or the directory of a checkpoint.
        overrides: configuration to change, such as `steps=500`.
        live: whether a panel shows progress, as for `run`.
        environment: factories and processes to use; None: those of `hflow run`.

    Raises:
        HflowError: for the reasons of `run`, and if the run cannot continue.
    """
    resumed = find_resumed(str(run), overrides)
    return _run(resumed.compiled, live, environment or RunEnvironment(), resumed)


def _run(
    compiled: Compiled, live: bool | None, environment: RunEnvironment, resumed: ResumedRun | None
) -> RunSummary:
    check_saving(compiled.config, compiled.graph)
    check_variables(compiled.config)
    check_faults(compiled.config)
    check_determinism(compiled)
    refuse_unrunnable(compiled)
    return asyncio.run(_run_in_loop(compiled, live, environment, resumed))


async def _run_in_loop(
    compiled: Compiled, live: bool | None, environment: RunEnvironment, resumed: ResumedRun | None
) -> RunSummary:
    """Check data and models before the run's directory is created or changed.

    Workers import torch while this process does so for the checks of models.
    """
    (rows, row_files), config = open_rows(compiled), compiled.config
    setup = make_setup(compiled, environment.factories)
    find_inputs, input_warnings = partial(run_inputs, compiled, row_files), list[str]()
    if resumed is not None:
        inputs, input_warnings = resumed.check_inputs(find_inputs)
    console = SafeConsole(quiet=True) if environment.is_quiet else None
    async with AsyncExitStack() as stack:
        display = stack.enter_context(open_display(config.name, live, console))
        processes = None
        if config.workers == "ray":
            processes = environment.processes or make_processes(compiled.plan, config.env)
            if not processes.is_shared:
                stack.push_async_callback(processes.close)
            processes.refuse_impossible()
        # They continue while Ray starts.
        model_checks = _in_background(partial(import_module, "hflow.launch.running.model_checks"))
        hashing = None if resumed else _in_background(find_inputs)
        if processes is not None:
            with suppress(WorkerFailureError):  # `_Attempts` starts them again
                processes.start(display.note)
        (await model_checks).check_models(compiled, setup)
        if hashing is not None:
            inputs = await hashing
        files = to_yaml(config), plan_file_text(compiled) + "\n"
        directory = resumed.directory if resumed else RunDirectory.create(config.out, config.name, *files)
        setup = replace(setup, weights_directory=str(resolved(directory.weights)))
        if processes is not None and not processes.is_shared:
            setup = replace(setup, sample_log_directory=str(resolved(directory.sample_log)))
        if resumed is None:
            stack.enter_context(_removed_if_refused(directory))
        stack.enter_context(directory.locked())
        metrics: list[dict[str, float | None]] = []
        if resumed is not None:
            rewind_run(directory, resumed.point)
            metrics = directory.drop_metrics_after(resumed.steps)
            directory.keep_trace()
            directory.error.unlink(missing_ok=True)
            directory.write_plan(*files)
        replace_text(directory.inputs, inputs.to_json())
        checkpoints = Checkpoints(directory.checkpoints, config.keep_checkpoints, config.keep_best)
        checkpoints.drop_unfinished()
        set_aside: list[str] = []
        if resumed is not None:
            set_aside = checkpoints.rewind(resumed.steps)
            checkpoints.restore_values(metrics)
        observers = _open_observers(compiled, environment, directory, resumed)
        with _observer(compiled, directory, display, checkpoints, observers) as observer:
            display.note(f"{config.name}: plan {compiled.plan.digest[:12]}, results in {directory.path}")
            if resumed is not None:
                observer.on_rewind(resumed.steps)
            for line in _checkpoint_notes(compiled, resumed):
                display.note(line)
            if set_aside:
                display.note(
                    f"later checkpoints are kept as {', '.join(set_aside)}; delete what you do not need"
                )
            for warning in (*compiled.plan.warnings, *input_warnings):
                observer.on_warning(warning)
            signals = StopSignals(display.note)
            attempts = _Attempts(compiled, processes, setup, rows, directory, observer, checkpoints, signals)
            try:
                summary = await attempts.run(resumed.point if resumed else None)
            except asyncio.CancelledError:
                if not signals.is_requested:
                    raise
                summary = _stopped_early(compiled, directory, checkpoints.last or 0)
            except HflowError as error:
                directory.write_error(str(error))
                if checkpoints.last is not None or isinstance(error, RunError):  # else it would fail again
                    display.note(_resume_hint(directory, checkpoints))
                raise
            finally:
                signals.remove()
                checkpoints.drop_unfinished()
            observer.close(summary.reason)
    directory.write_summary(summary.to_json())
    return summary


def _in_background(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Do something on a thread that leaves SIGTERM to this one, as do those that libraries start there.

    While Ray starts, other threads would take the signal, and end the process (`ray_actors`).
    """
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    thread = ThreadPoolExecutor(1, "hflow-start", block)
    result = asyncio.get_running_loop().run_in_executor(thread, work)
    thread.shutdown(wait=False)
    return result


@dataclass
class _Attempts:
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

    async def run(self, point: ResumePoint | None) -> RunSummary:
        """Run to the end, beginning at a checkpoint.

        Raises:
            WorkerFailureError: when workers have failed more often than the configuration allows.
        """
        num_restarts = 0
        while True:
            workers = make_workers(self.processes)
            setup = resumed_setup(self.setup, self.compiled, point) if point else self.setup
            self.signals.stop_by(None)
            try:
                async with _started(workers, setup, self.observer.on_progress):
                    return await self._execute(workers, point)
            except WorkerFailureError as failure:
                if self.signals.is_requested:  # it may have reached the workers too
                    self.observer.on_warning(f"{failure}; the run was being stopped and is not saved again")
                    return _stopped_early(self.compiled, self.directory, self.checkpoints.last or 0)
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
            f"{failure}; the run continues from step {steps} (restart {number} of {most})"
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
                compiled.plan, workers, self.observer, self.checkpoints, ledger, config.seed
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
            samples=samples,
            values=dict(self.observer.shown),
            not_evaluated=self.observer.not_evaluated,
            warnings=tuple(self.observer.warnings),
        )


@contextmanager
def _removed_if_refused(directory: RunDirectory) -> Iterator[None]:
    """Delete the directory of a new run that is refused, so that it is not taken for a run."""
    try:
        yield
    except HflowError as error:
        if _is_refused(directory, error):
            directory.remove()
        raise


def _is_refused(directory: RunDirectory, error: HflowError) -> bool:
    """Return whether an error refuses a new run before it begins, so that nothing of it can continue."""
    return not directory.ledger.is_file() and not isinstance(error, RunError)


def _checkpoint_notes(compiled: Compiled, resumed: ResumedRun | None) -> Iterator[str]:
    """Yield what is saved and kept, and where a resumed run continues."""
    config = compiled.config
    if resumed is not None:
        steps = resumed.steps
        where = f"continues after step {steps}" if steps else "was never saved and begins again"
        change = f"; {resumed.diff.verdict}" if resumed.diff.decided else ""
        yield f"the run {where}{change}"
    if not saved_models(compiled.graph):
        return
    times = [f"every {config.save_minutes:g} minutes"] * bool(config.save_minutes)
    times += [f"every {config.save_every} steps"] * bool(config.save_every)
    kept = "all are" if config.keep_checkpoints is None else f"the last {config.keep_checkpoints} are"
    best = f", and the best by {config.keep_best.removeprefix('-')}" if config.keep_best else ""
    yield f"checkpoints {', '.join([*times, 'and at the end' if times else 'at the end'])}; {kept} kept{best}"


def _resume_hint(directory: RunDirectory, checkpoints: Checkpoints) -> str:
    """Return the step that is safe, and the command that continues from there."""
    saved = "nothing is saved yet" if checkpoints.last is None else f"step {checkpoints.last} is saved"
    return f"{saved}; to continue: hflow run --resume {directory.path}"


def _stopped_early(compiled: Compiled, directory: RunDirectory, steps: int) -> RunSummary:
    """Return the summary of a run that was stopped while its workers started."""
    return RunSummary(
        name=compiled.config.name,
        directory=directory.path,
        steps=steps,
        seconds=0.0,
        reason="stopped",
        plan_digest=compiled.plan.digest,
        samples={},
    )


def _open_observers(
    compiled: Compiled, environment: RunEnvironment, directory: RunDirectory, resumed: ResumedRun | None
) -> ObserverThread:
    """Start the configured trackers and the recipe's observers.

    Raises:
        ConfigError: if one cannot start.
    """
    config = compiled.config
    asked = () if environment.is_quiet else (*open_trackers(config.report), *compiled.observers)
    observers, is_resumed = ObserverThread(asked), resumed is not None
    path = directory.path.absolute()
    observers.start(RunInfo(config.name, path, config.steps, dict(flatten(config)), is_resumed))
    return observers


@contextmanager
def _observer(
    compiled: Compiled,
    directory: RunDirectory,
    display: Display,
    checkpoints: Checkpoints,
    observers: ObserverThread,
) -> Iterator[RunObserver]:
    # They import torch (through tensorboardX), which must not delay the start of workers.
    from hflow.launch.running.run_observer import RunObserver
    from hflow.runtime.records.metrics_log import MetricsLog

    report = compiled.config.report
    trace = Trace()
    with closing(MetricsLog(directory.metrics, directory.tensorboard, builtin_metrics())) as log:
        observer = RunObserver(compiled.plan, log, trace, display, report, checkpoints, directory, observers)
        try:
            yield observer
        finally:
            observer.close("failed")  # it has no effect after the end of a run that did not fail
            try:
                trace.write(directory.trace)
            except WriteError as error:  # what ended the run is more important
                display.note(str(error))


@asynccontextmanager
async def _started(
    workers: Workers, setup: WorkerSetup, report_progress: Callable[[str], None]
) -> AsyncIterator[None]:
    start = time.monotonic()
    directories = [path for path in (setup.weights_directory, setup.sample_log_directory) if path]
    try:
        _remove(directories)  # a controller that was killed may have left files
        await workers.start(setup, report_progress)
        freeze_gc()
        report_progress(
            f"workers are ready after {time.monotonic() - start:.0f} s; generating the first samples"
        )
        yield
    finally:
        await workers.close()
        _remove(directories)


def _remove(directories: Sequence[str]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals by which people, schedulers and a terminal that is closed ask a process to end.

    SIGHUP is none where it is ignored, as `nohup` lets it be.
    """
    ignores = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return signal.SIGINT, signal.SIGTERM, *(() if ignores else (signal.SIGHUP,))


SAME_REQUEST_SECONDS = 2.0
"""Signals that follow within this time are one request: schedulers and wrappers send one to a process and to
its group."""


class StopSignals:
    """Handles the signals that schedulers and people send to end a run. It belongs to the running event loop.

    Ctrl-C, SIGTERM and SIGHUP ask a run to stop; a second signal ends it at once.

    Args:
        note: shows a line to the user.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._requested_at: float | None = None
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._stop: Callable[[], None] | None = None
        self._signals = stop_signals()
        self.install()

    @property
    def is_requested(self) -> bool:
        """Whether a signal has come."""
        return self._requested_at is not None

    def install(self) -> None:
        """Handle signals. Called again after a library may have set handlers of its own."""
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal, number)

    def remove(self) -> None:
        """Let signals end the process."""
        for number in self._signals:
            self._loop.remove_signal_handler(number)

    def stop_by(self, stop: Callable[[], None] | None) -> None:
        """Call a function at the first signal; None: cancel the task."""
        self._stop = stop
        self.install()
        if self.is_requested and stop is not None:
            stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._requested_at is not None:
            if time.monotonic() - self._requested_at > SAME_REQUEST_SECONDS:
                self.remove()
                os.kill(os.getpid(), number)
            return
        self._requested_at = time.monotonic()
        if self._stop is None:
            self._note("stopping")
            assert self._task is not None
            self._task.cancel()
        else:
            self._note(
                "stopping: the step that has begun is completed, and the run is saved; a second Ctrl-C ends "
                "it at once"
            )
            self._stop()
