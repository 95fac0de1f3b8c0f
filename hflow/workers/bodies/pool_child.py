"""What runs inside a child process of the pool. Imports neither torch nor ray by itself."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import cloudpickle

from hflow.errors import RunError
from hflow.workers.error_location import blame

ASYNC_STEP_SECONDS = 0.05
"""Longest wait of one step of the asynchronous lane before new jobs are taken in."""

JobId = tuple[str, int]
"""What a job is for: its node, and a sample or a group."""
CANCELLED = "was cancelled"


@dataclass(frozen=True)
class Job:
    """One call of a body, named by what it is for."""

    node: str
    key: int
    arguments: Mapping[str, Any]
    timeout: float | None = None

    @property
    def name(self) -> JobId:
        """What it is for."""
        return self.node, self.key


@dataclass(frozen=True)
class JobResult:
    """What became of a job: `reason` None means that `value` is the body's result."""

    node: str
    key: int
    value: Any = None
    reason: Literal["failed", "timeout"] | None = None
    message: str = ""
    killed: bool = False
    """Whether its process had to be killed, or died: a further attempt runs alone."""


def cancelled(job: Job) -> JobResult:
    """The outcome of a job that nobody wants any more."""
    return JobResult(job.node, job.key, reason="failed", message=CANCELLED)


@dataclass
class _Child:
    """State of this process: its bodies, and the loop on which asynchronous ones run."""

    bodies: dict[str, Callable[..., Any]] = field(default_factory=dict)
    loop: asyncio.AbstractEventLoop | None = None
    running: dict[JobId, asyncio.Task[JobResult]] = field(default_factory=dict)


_child = _Child()


def install(shipped: Mapping[str, bytes]) -> None:
    """Load the bodies, once per process."""
    _child.bodies = {node: _load(pickled) for node, pickled in shipped.items()}


def _load(pickled: bytes) -> Callable[..., Any]:
    """The body; where its module cannot be imported, one that says so at every call."""
    try:
        body: Callable[..., Any] = cloudpickle.loads(pickled)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        message = f"its module cannot be loaded in a child process: {type(error).__name__}: {error}"
        return partial(_refuse, message)
    return body


def _refuse(message: str, **_: Any) -> Any:
    raise RunError(message)


def run_chunk(jobs: Sequence[Job], slice_seconds: float) -> bytes:
    """Run jobs one after the other, starting none after the slice is over.

    Returns:
        The pickled outcomes of the jobs that ran, a prefix of `jobs` of at least one.
    """
    deadline = time.monotonic() + slice_seconds
    outcomes = []
    for job in jobs:
        outcomes.append(_run(job))
        if time.monotonic() > deadline:
            break
    return _pickled(outcomes)


def _run(job: Job) -> JobResult:
    body = _child.bodies[job.node]
    try:
        return JobResult(job.node, job.key, body(**job.arguments))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as a body may
        return JobResult(job.node, job.key, reason="failed", message=blame(error, body))


def run_alone(job: Job) -> bytes:
    """Run one job; returns its pickled outcome, in a list."""
    if is_async(_child.bodies[job.node]):
        return _pickled([asyncio.run(_await(job))])
    return _pickled([_run(job)])


def run_async(jobs: Sequence[Job], unwanted: Sequence[JobId] = ()) -> bytes:
    """Start jobs on this process's loop, and wait a moment for any that run to finish.

    Args:
        jobs: to start.
        unwanted: jobs that run and are to be stopped.

    Returns:
        The pickled outcomes of those that did; the others go on at the next call.
    """
    if _child.loop is None:
        _child.loop = asyncio.new_event_loop()
    _child.running |= {job.name: _child.loop.create_task(_await(job)) for job in jobs}
    for name in unwanted:
        if name in _child.running:
            _child.running[name].cancel()
    waiting = asyncio.wait(
        _child.running.values(), timeout=ASYNC_STEP_SECONDS, return_when=asyncio.FIRST_COMPLETED
    )
    _child.loop.run_until_complete(waiting)
    finished = [name for name, task in _child.running.items() if task.done()]
    return _pickled([_child.running.pop(name).result() for name in finished])


async def _await(job: Job) -> JobResult:
    body = _child.bodies[job.node]
    clock = asyncio.timeout(job.timeout)
    try:
        async with clock:
            return JobResult(job.node, job.key, await body(**job.arguments))
    except asyncio.CancelledError:
        return cancelled(job)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as a body may
        if clock.expired():
            return JobResult(job.node, job.key, reason="timeout", message=too_long(job.timeout))
        return JobResult(job.node, job.key, reason="failed", message=blame(error, body))


def too_long(timeout: float | None) -> str:
    """The message of a job that ran out of time."""
    return f"took longer than its timeout of {timeout:g} s"


def _pickled(outcomes: list[JobResult]) -> bytes:
    """Pickle outcomes; one whose value cannot be pickled becomes a failure of its own."""
    try:
        return pickle.dumps(outcomes, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError):
        return pickle.dumps([_picklable(outcome) for outcome in outcomes], pickle.HIGHEST_PROTOCOL)


def _picklable(outcome: JobResult) -> JobResult:
    try:
        pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        message = f"returned a value that cannot be sent between processes: {error}"
        return JobResult(outcome.node, outcome.key, reason="failed", message=message)
    return outcome


def is_async(body: Callable[..., Any]) -> bool:
    """Whether a body is asynchronous."""
    return inspect.iscoroutinefunction(body)
