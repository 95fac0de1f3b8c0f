"""`hflow run`: creates the run's directory, starts workers, runs the plan, and returns a summary."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hflow.base.durable_files import WriteError, replace_text
from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.base.files import resolved
from hflow.base.garbage import freeze_imports
from hflow.base.terminal import SafeConsole
from hflow.base.waiting import print_waits
from hflow.config import flatten, to_yaml
from hflow.config.schema import ONE_PROCESS
from hflow.dsl import Recipe
from hflow.environments.client import close_hosts
from hflow.graph.queries import saved_models
from hflow.launch.checkpoints.fingerprints import RunInputs
from hflow.launch.checkpoints.merged import check_base
from hflow.launch.planning.compile import Compiled, compile_plan_file, compile_recipe, plan_file_text
from hflow.launch.planning.services import check_service_keys, service_settings
from hflow.launch.running.attempts import Attempts
from hflow.launch.running.inputs import run_inputs
from hflow.launch.running.observer_thread import ObserverThread
from hflow.launch.running.preflight import (
    check_determinism,
    check_environments,
    check_faults,
    check_ray,
    check_sandboxes,
    check_saving,
    check_variables,
    refuse_unrunnable,
)
from hflow.launch.running.resume import (
    ResumedRun,
    find_resumed,
    rewind_run,
)
from hflow.launch.running.shown_metrics import builtin_metrics
from hflow.launch.running.stop_signals import StopSignals, request_stop
from hflow.launch.running.trackers import open_trackers
from hflow.launch.running.worker_setup import make_processes, make_setup, open_rows, source_config
from hflow.models.hub import fetch_model, has_weights
from hflow.models.merged import is_adapter, saved_merged
from hflow.observer import RunInfo
from hflow.planner.diff import Effect
from hflow.planner.models.descriptors import factories
from hflow.report.text.live import Display, open_display
from hflow.runtime.records.live_files import LiveFiles
from hflow.runtime.records.metric_columns import drop_rows_after, read_curves
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.services.server import LOOPBACK, LimitServer
from hflow.workers.interface import WorkerSetup
from hflow.workers.process_setup import ray_address

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


def run(recipe: str | Path | Recipe, overrides: Sequence[str] = (), live: bool | None = None) -> RunSummary:
    """Run a recipe. In a notebook, interrupting the kernel stops it, as Ctrl-C does in a terminal.

    Args:
        recipe: path of the recipe's Python file, the name of a shipped one, or a `Recipe`.
        overrides: configuration as `key=value`.
        live: show a live panel (True) or plain lines (False); None: a panel if the output is a terminal or a
            notebook.

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
    """Run exactly the plan in a plan file or in an earlier run's directory; arguments of `compile_plan_file`.

    Raises:
        HflowError: for the reasons of `run`, and if the recipe's plan differs from the stored one.
    """
    return run_compiled(compile_plan_file(file, recipe, overrides), live)


def run_compiled(
    compiled: Compiled, live: bool | None, environment: RunEnvironment | None = None
) -> RunSummary:
    """Run a compiled recipe, with a live panel as for `run`, in the environment of `hflow run` by default.

    Raises:
        HflowError: for any error that a user can fix, before or during the run.
    """
    return _run(compiled, live, environment or RunEnvironment(), None)


def resume(
    run: str | Path,
    overrides: Sequence[str] = (),
    live: bool | None = None,
    environment: RunEnvironment | None = None,
    *,
    recipe: Recipe | None = None,
) -> RunSummary:
    """Continue a run from its last checkpoint, in its own directory.

    Args:
        run: a run's directory, NAME for the latest run in `runs/NAME`, or the directory of a checkpoint.
        overrides: configuration to change, such as `steps=500`.
        live: whether a panel shows progress, as for `run`.
        environment: factories and processes to use; None: those of `hflow run`.
        recipe: the recipe, if it is defined in a notebook; None: that of the file with which the run began.

    Raises:
        HflowError: for the reasons of `run`, and if the run cannot continue.
    """
    resumed = find_resumed(str(run), overrides, recipe)
    return _run(resumed.compiled, live, environment or RunEnvironment(), resumed)


def _run(
    compiled: Compiled, live: bool | None, environment: RunEnvironment, resumed: ResumedRun | None
) -> RunSummary:
    check_saving(compiled.config, compiled.graph)
    check_ray(compiled.config)
    check_variables(compiled.config)
    check_faults(compiled.config)
    _check_keys(compiled)
    check_determinism(compiled)
    refuse_unrunnable(compiled)
    _fetch_models(compiled, SafeConsole(stderr=True, quiet=environment.is_quiet))
    if compiled.config.workers == "debug":
        live = False  # the debugger has the terminal
    return _run_to_end(partial(_run_in_loop, compiled, live, environment, resumed))


def _check_keys(compiled: Compiled) -> None:
    """Check that keys of services are there, if workers are on this machine."""
    if compiled.config.workers != "ray" or ray_address(compiled.plan.cluster) is None:
        check_service_keys(compiled.config)


def _run_to_end(work: Callable[[], Coroutine[Any, Any, RunSummary]]) -> RunSummary:
    """Run a coroutine on an event loop of its own. Where there is one, as in notebooks, it is a thread's.

    The first interrupt of a notebook's kernel stops the run, and the second one, or one before the run can
    stop by itself, cancels it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()

    async def begin() -> RunSummary:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await work()

    with ThreadPoolExecutor(1, "hflow-run") as thread:
        result = thread.submit(asyncio.run, begin())
        while True:
            try:
                return result.result()
            except asyncio.CancelledError:  # before there was anything to save
                raise KeyboardInterrupt from None
            except KeyboardInterrupt:
                if not request_stop():
                    loop, task = begun.result()
                    loop.call_soon_threadsafe(task.cancel)


def _fetch_models(compiled: Compiled, console: SafeConsole) -> None:
    """Fetch models of the Hub, and merge adapters, whose workers are on this machine, before all else starts.

    Raises:
        ConfigError: if one cannot be fetched, or an adapter was trained beside other weights.
    """
    paths = {spec.name: source_config(compiled, spec).path for spec in compiled.graph.models}
    for path in paths.values():
        if path is not None and is_adapter(Path(path)) and saved_merged(Path(path)) is None:
            check_base(Path(path))
    if compiled.config.workers == "ray" and ray_address(compiled.plan.cluster) is not None:
        return  # workers fetch what they need
    for name, path in paths.items():
        if path is not None and not has_weights(path):
            console.print(f"{'merging' if is_adapter(Path(path)) else 'fetching'} the weights of {path}")
            fetch_model(path, f"models.{name}.path")


async def _run_in_loop(
    compiled: Compiled, live: bool | None, environment: RunEnvironment, resumed: ResumedRun | None
) -> RunSummary:
    """Check data and models before the run's directory is created or changed, and then run."""
    config, console = compiled.config, SafeConsole(stderr=True, quiet=environment.is_quiet)
    with print_waits(console.print)("environments and rows of data"):
        check_environments(compiled)
        check_sandboxes(compiled)
        rows, row_files = open_rows(compiled)
    services = _limit_server(compiled, resumed)
    if config.workers not in ONE_PROCESS:
        close_hosts()  # each worker starts its own
    setup = make_setup(compiled, environment.factories)
    find_inputs, input_warnings = partial(run_inputs, compiled, row_files), list[str]()
    if resumed is not None:
        inputs, input_warnings = resumed.check_inputs(find_inputs)
    async with AsyncExitStack() as stack:
        quiet = console if environment.is_quiet else None
        display = stack.enter_context(open_display(config.name, live, quiet))
        processes = None
        if config.workers == "ray":
            processes = environment.processes or make_processes(compiled.plan, config.env)
            if not processes.is_shared:
                stack.push_async_callback(processes.close)
            processes.refuse_impossible()
        hashing = _in_background(find_inputs) if resumed is None else None
        await _check_models_while_ray_starts(compiled, setup, processes, display)
        if hashing is not None:
            with display.wait_for("checksums of data and models"):
                inputs = await hashing
        directory, checkpoints, set_aside = stack.enter_context(_open_directory(compiled, resumed, inputs))
        setup = replace(
            setup,
            weights_directory=str(resolved(directory.weights)),
            engine_logs=str(resolved(directory.engine_logs)),
        )
        if services is not None:
            services.file = directory.services
            setup = replace(setup, services=(await stack.enter_async_context(services)).access)
        if processes is not None and not processes.is_shared:
            setup = replace(setup, sample_log_directory=str(resolved(directory.sample_log)))
        observers = _open_observers(compiled, environment, directory, resumed)
        observer = stack.enter_context(_observer(compiled, directory, display, checkpoints, observers))
        display.note(f"{config.name}: plan {compiled.plan.digest[:12]}, results in {directory.path}")
        if resumed is not None:
            observer.on_rewind(resumed.steps)
        for line in _checkpoint_notes(compiled, resumed, set_aside):
            display.note(line)
        for warning in (*compiled.plan.warnings, *input_warnings):
            observer.on_warning(warning)
        signals = StopSignals(display.note)
        attempts = Attempts(
            compiled,
            processes,
            setup,
            rows,
            directory,
            observer,
            checkpoints,
            signals,
            display.note,
            services,
        )
        summary = await attempts.run(resumed.point if resumed else None)
        observer.close(summary.reason)
    directory.write_summary(summary.to_json())
    return summary


def _limit_server(compiled: Compiled, resumed: ResumedRun | None) -> LimitServer | None:
    """Return the limits of the run's services, with what it has spent; None: it has no services.

    Raises:
        ConfigError: if a budget is used up, or the record of it is damaged.
    """
    if not (settings := service_settings(compiled.config)):
        return None
    host = LOOPBACK
    if compiled.config.workers == "ray" and ray_address(compiled.plan.cluster) is not None:
        import ray

        host = ray.util.get_node_ip_address()
    return LimitServer(settings, resumed.directory.services if resumed else None, host)


async def _check_models_while_ray_starts(
    compiled: Compiled, setup: WorkerSetup, processes: RayActors | None, display: Display
) -> None:
    """Check models. Meanwhile Ray starts, and workers import torch as this process does for the checks."""
    model_checks = _in_background(_model_checks)
    if processes is not None:
        with suppress(WorkerFailureError):  # `Attempts` starts them again
            processes.start(display.note, display.wait_for)
    with display.wait_for("torch to load and models to be checked"):
        (await model_checks).check_models(compiled, setup)


def _model_checks() -> ModuleType:
    """Import what checks models, and with it torch and transformers."""
    is_first = "torch" not in sys.modules
    module = import_module("hflow.launch.running.model_checks")
    if is_first:
        freeze_imports()
    return module


def _in_background(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Do something on a thread that leaves SIGTERM to this one, as do those that libraries start there.

    While Ray starts, other threads would take the signal, and end the process (`ray_actors`).
    """
    block = partial(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGTERM})
    thread = ThreadPoolExecutor(1, "hflow-start", block)
    result = asyncio.get_running_loop().run_in_executor(thread, work)
    thread.shutdown(wait=False)
    return result


@contextmanager
def _open_directory(
    compiled: Compiled, resumed: ResumedRun | None, inputs: RunInputs
) -> Iterator[tuple[RunDirectory, Checkpoints, list[str]]]:
    """Make the directory of a run, or take that of a resumed run back to its checkpoint; keep other runs out.

    Yields:
        The directory, its checkpoints, and the names of a resumed run's later checkpoints, which are kept.
    """
    config = compiled.config
    files = to_yaml(config), plan_file_text(compiled) + "\n"
    with ExitStack() as stack:
        if resumed is not None:
            directory = resumed.directory
        else:
            directory = RunDirectory.create(config.out, config.name, *files)
            stack.enter_context(_removed_if_refused(directory))
        stack.enter_context(directory.locked())
        if resumed is not None:
            rewind_run(directory, resumed.point)
            if directory.metrics.is_file():  # a run that was killed before its first step has none
                drop_rows_after(directory.metrics, resumed.steps)
            directory.keep_trace()
            directory.error.unlink(missing_ok=True)
            directory.summary.unlink(missing_ok=True)  # a kill leaves none
            directory.write_plan(*files)
        replace_text(directory.inputs, inputs.to_json())
        checkpoints = Checkpoints(directory.checkpoints, config.keep_checkpoints, config.keep_best)
        checkpoints.drop_unfinished()
        set_aside: list[str] = []
        if resumed is not None:
            set_aside = checkpoints.rewind(resumed.steps)
            checkpoints.restore_values(read_curves(directory.metrics) if directory.metrics.is_file() else {})
        yield directory, checkpoints, set_aside


@contextmanager
def _removed_if_refused(directory: RunDirectory) -> Iterator[None]:
    """Delete the directory of a new run that is refused, so that it is not taken for a run."""
    try:
        yield
    except HflowError as error:
        if not directory.ledger.is_file() and not isinstance(error, RunError):  # it has not begun
            directory.remove()
        raise


def _checkpoint_notes(
    compiled: Compiled, resumed: ResumedRun | None, set_aside: Sequence[str]
) -> Iterator[str]:
    """Yield what is saved and kept, and where a resumed run continues; `set_aside` are later checkpoints."""
    config = compiled.config
    if resumed is not None:
        steps = resumed.steps
        where = f"continues after step {steps}" if steps else "was never saved and begins again"
        resharded = [str(change) for change in resumed.diff.decided_by_user(Effect.RESHARD)]
        yield f"the run {where}{'; resharded: ' if resharded else ''}{'; '.join(resharded)}"
        yield from resumed.change_notes()
    if not saved_models(compiled.graph):
        return
    times = [f"every {config.save_minutes:g} minutes"] * bool(config.save_minutes)
    times += [f"every {config.save_every} steps"] * bool(config.save_every)
    kept = "all are" if config.keep_checkpoints is None else f"the last {config.keep_checkpoints} are"
    best = f", and the best by {config.keep_best.removeprefix('-')}" if config.keep_best else ""
    yield f"checkpoints {', '.join([*times, 'and at the end' if times else 'at the end'])}; {kept} kept{best}"
    if set_aside:
        yield f"later checkpoints are kept as {', '.join(set_aside)}; delete what you do not need"


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
        observer = RunObserver(
            compiled.plan,
            log,
            trace,
            display,
            report,
            checkpoints,
            directory,
            observers,
            shows_output=compiled.config.workers != "debug",
        )
        files = LiveFiles(trace, directory.trace, observer.activity, directory.activity)
        try:
            yield observer
        finally:
            observer.close("failed")  # it has no effect after the end of a run that did not fail
            try:
                files.close()
            except WriteError as error:  # what ended the run is more important
                display.note(str(error))
