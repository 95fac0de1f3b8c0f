"""What runs inside a child process of the pool: loads bodies, runs jobs, returns pickled results.

This module must import neither torch nor ray, so that a child process starts quickly and stays small. A
child process imports what the bodies import.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from bdb import BdbQuit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle

from hflow.base.errors import ReturnError, RunError, timeout_message
from hflow.data.batches.returned_values import DeclaredReturns, checked_value
from hflow.processes.error_location import error_with_location
from hflow.services.client import ServiceAccess, use_services
from hflow.types import Unit
from hflow.types.node_setup import setup_of
from hflow.workers.bodies.body_output import BodyOutput, body_call, copy_log_levels, send_lines
from hflow.workers.bodies.seeding import seed_generators

ASYNC_STEP_SECONDS = 0.05
"""`run_async` returns after this long at the latest, so that the lane can send it new jobs."""

JobId = tuple[str, int]
"""A node, and the sample or group that its body is called for."""


@dataclass(frozen=True)
class Job:
    """One call of a body."""

    node: str
    key: int
    """The sample or group."""
    arguments: Mapping[str, Any]
    timeout: float | None = None
    """Seconds for one attempt."""
    lengths: tuple[int, ...] = ()
    """The number of tokens of each sample that the body is called for."""

    @property
    def id(self) -> JobId:
        """The job's node and key."""
        return self.node, self.key


@dataclass(frozen=True)
class JobResult:
    """The result of a job: `value` and `metrics` if `reason` is None, else why it failed."""

    node: str
    key: int
    value: Any = None
    """The value of each declared field. Of a body that declares nothing, what it returned."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: Literal["failed", "timeout"] | None = None
    message: str = ""
    killed: bool = False
    """Whether its process was killed or died. Further attempts then run in a process of their own."""
    by_signal: bool = False
    """Whether another process, or the kernel, has ended its process."""


def cancelled_result(job: Job) -> JobResult:
    """Return the result of a cancelled job."""
    return JobResult(job.node, job.key, reason="failed", message="was cancelled")


def is_async(body: Callable[..., Any]) -> bool:
    """Return whether a body is a coroutine function."""
    return inspect.iscoroutinefunction(body)


@dataclass
class _ChildState:
    """State of this process: its bodies, and the event loop on which asynchronous ones run."""

    bodies: dict[str, Callable[..., Any]] = field(default_factory=dict)
    returns: Mapping[str, DeclaredReturns] = field(default_factory=dict)
    """Node -> what its body declares to return."""
    problems: dict[str, str] = field(default_factory=dict)
    """Node -> why its setup failed."""
    is_debugged: bool = False
    """Whether a debugger can use the terminal."""
    seed: int = 0
    """The run's seed."""
    loop: asyncio.AbstractEventLoop | None = None
    running: dict[JobId, asyncio.Task[JobResult]] = field(default_factory=dict)


_child = _ChildState()


def load_bodies(
    pickled: Mapping[str, bytes],
    seed: int,
    returns: Mapping[str, DeclaredReturns],
    writer: Connection[Any, Any] | None,
    levels: Mapping[str, int],
    services: ServiceAccess | None = None,
) -> None:
    """Load the bodies of nodes and set them up; the pool calls this once in every process.

    Without a writer for what bodies print, this is the worker's own process, in which a debugger can use the
    terminal. `levels` are those that the worker's process logs.
    """
    _child.is_debugged = writer is None
    if writer is not None:
        BodyOutput(partial(send_lines, writer))
        copy_log_levels(levels)
    use_services(services)
    _child.seed = seed
    _child.returns = returns
    _child.bodies = {node: _load_body(body) for node, body in pickled.items()}
    for node, body in _child.bodies.items():
        if problem := run_setup(body):
            _child.problems[node] = problem
            _child.bodies[node] = partial(_raise_run_error, problem)


def run_setup(body: Callable[..., Any]) -> str:
    """Prepare this process for calls of a body. Returns why that failed, or an empty text."""
    setup = setup_of(body)
    if setup is None:
        return ""
    try:
        setup()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a setup may raise anything
        return f"its setup failed: {error_with_location(error, body)}"
    return ""


def setup_problem(node: str) -> str:
    """Return the reason why the setup of a node failed in this process; empty if it did not."""
    return _child.problems.get(node, "")


def _load_body(pickled: bytes) -> Callable[..., Any]:
    """Return the body or, if its module cannot be imported, a function that raises this at every call."""
    try:
        body: Callable[..., Any] = cloudpickle.loads(pickled)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        message = f"its module cannot be loaded in a child process: {type(error).__name__}: {error}"
        return partial(_raise_run_error, message)
    return body


def _raise_run_error(message: str, **_: Any) -> Any:
    raise RunError(message)


def run_chunk(jobs: Sequence[Job], slice_seconds: float) -> bytes:
    """Run jobs one after the other, starting none later than `slice_seconds` after the first.

    Return the pickled results of the jobs that ran: the first of `jobs`, at least one.
    """
    deadline = time.monotonic() + slice_seconds
    results = []
    for job in jobs:
        results.append(_run(job))
        if time.monotonic() > deadline:
            break
    return _pickle(results)


def run_isolated(job: Job) -> bytes:
    """Run one job and return its pickled result, in a list."""
    if is_async(_child.bodies[job.node]):
        return _pickle([_loop().run_until_complete(_await(job))])
    return _pickle([_run(job)])


def run_async(jobs: Sequence[Job], cancelled: Sequence[JobId] = ()) -> bytes:
    """Start jobs on this process's event loop and cancel others, and wait until one ends or the step is over.

    Returns the pickled results of the jobs that ended. The others continue in the next call.
    """
    loop = _loop()
    _child.running |= {job.id: loop.create_task(_await(job)) for job in jobs}
    for job_id in cancelled:
        if job_id in _child.running:
            _child.running[job_id].cancel()
    waiting = asyncio.wait(
        _child.running.values(), timeout=ASYNC_STEP_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    loop.run_until_complete(waiting)
    done = [job_id for job_id, task in _child.running.items() if task.done()]
    return _pickle([_child.running.pop(job_id).result() for job_id in done])


def _loop() -> asyncio.AbstractEventLoop:
    """Return the one event loop of this process, to which clients that a setup opened belong."""
    if _child.loop is None:
        _child.loop = asyncio.new_event_loop()
    return _child.loop


def _run(job: Job) -> JobResult:
    body = _child.bodies[job.node]
    seed_generators(_child.seed, job.node, job.key)
    try:
        with body_call(body, job.node, job.key):
            result = body(**job.arguments)
    except BdbQuit as error:
        return _debugger_result(job, error)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - a body may raise anything
        return JobResult(job.node, job.key, reason="failed", message=error_with_location(error, body))
    return _checked(job, result)


def _debugger_result(job: Job, error: BdbQuit) -> JobResult:
    """Return the result of a body whose debugger ended, as it has no terminal here.

    Raises:
        RunError: if it has, so that the user has ended it.
    """
    if _child.is_debugged:
        raise RunError(f"{job.node} was ended in the debugger") from error
    message = "breakpoint() needs the terminal; run with workers=debug"
    return JobResult(job.node, job.key, reason="failed", message=message)


async def _await(job: Job) -> JobResult:
    body = _child.bodies[job.node]
    limit = asyncio.timeout(job.timeout)
    try:
        with body_call(body, job.node, job.key):
            async with limit:
                result = await body(**job.arguments)
    except asyncio.CancelledError:
        return cancelled_result(job)
    except BdbQuit as error:
        return _debugger_result(job, error)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - a body may raise anything
        if limit.expired():
            return JobResult(job.node, job.key, reason="timeout", message=timeout_message(job.timeout))
        return JobResult(job.node, job.key, reason="failed", message=error_with_location(error, body))
    return _checked(job, result)


def _checked(job: Job, result: Any) -> JobResult:
    """Return a body's result as plain values, or the reason why it is not what the body declares."""
    declared = _child.returns.get(job.node)
    try:
        if declared is None:
            return JobResult(job.node, job.key, checked_value(job.node, "result", Unit.JSON, result, 0))
        fields, metrics = declared.read(result, job.lengths)
    except ReturnError as error:
        message = str(error).removeprefix(f"node {job.node!r}: ")
        return JobResult(job.node, job.key, reason="failed", message=message)
    return JobResult(job.node, job.key, fields, metrics)


def _pickle(results: list[JobResult]) -> bytes:
    """Pickle results, which have plain values only."""
    return pickle.dumps(results, pickle.HIGHEST_PROTOCOL)
