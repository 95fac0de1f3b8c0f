"""What the lanes of the pool have in common: killable calls and their returns."""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hflow.workers.pool_child import Job, Name, Outcome, too_long

PATIENCE_SECONDS = 1.0
"""Nobody waits longer for a neighbour in the same process: it is killed, and all its jobs run alone."""

Ended = list[tuple[Job, Outcome]]


@dataclass(frozen=True)
class Return:
    """A call into a child process that ended, one way or another."""

    lane: Lane
    jobs: Sequence[Job]
    """The jobs that were sent with it."""
    future: Future[bytes]

    def outcomes(self) -> list[Outcome] | None:
        """What the child reported; None when it was killed or died.

        Raises:
            Exception: the pool itself failed.
        """
        lost = TimeoutError | ProcessExpired | BrokenProcessPool
        if self.future.cancelled() or isinstance(self.future.exception(), lost):
            return None
        outcomes: list[Outcome] = pickle.loads(self.future.result())
        return outcomes

    def blame(self, job: Job) -> Outcome:
        """The outcome of the one job that its process was killed for, or died of."""
        error = None if self.future.cancelled() else self.future.exception()
        if isinstance(error, TimeoutError):
            return Outcome(job.node, job.key, reason="timeout", message=too_long(job.timeout), killed=True)
        code = f" (exit code {error.exitcode})" if isinstance(error, ProcessExpired) else ""
        return Outcome(job.node, job.key, reason="failed", message=f"its process died{code}", killed=True)


class Lane(abc.ABC):
    """A queue of jobs in front of processes; used by the pool's thread only."""

    def __init__(self, on_return: Callable[[Return], None]) -> None:
        self._on_return = on_return

    @abc.abstractmethod
    def queue(self, job: Job) -> None:
        """Take a job."""

    @abc.abstractmethod
    def pump(self) -> None:
        """Start what can be started."""

    @abc.abstractmethod
    def settle(self, returned: Return) -> tuple[Ended, list[Job]]:
        """The jobs that a return ended, and those that were lost with their process; others wait again."""

    @abc.abstractmethod
    def cancel(self, names: Iterable[Name]) -> list[Job]:
        """Let go of jobs: those that had not started are returned, those that run return soon."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes."""

    def _call(
        self,
        processes: ProcessPool,
        jobs: Sequence[Job],
        timeout: float | None,
        function: Callable[..., bytes],
        *arguments: Any,
    ) -> Future[bytes]:
        future: Future[bytes] = processes.schedule(function, args=arguments, timeout=timeout)
        future.add_done_callback(partial(self._returned, jobs))
        return future

    def _returned(self, jobs: Sequence[Job], future: Future[bytes]) -> None:
        self._on_return(Return(self, jobs, future))


class SharedLane(Lane):
    """A lane whose jobs share the processes of one pool, which is there from the start."""

    def __init__(self, start: Callable[[], ProcessPool], on_return: Callable[[Return], None]) -> None:
        super().__init__(on_return)
        self._start = start
        self._processes = start()

    def start(self) -> None:
        """Start the processes before the first job comes."""
        assert self._processes.active

    def close(self) -> None:
        """End the processes."""
        end(self._processes)

    def _send(
        self, jobs: Sequence[Job], timeout: float | None, function: Callable[..., bytes], *more: Any
    ) -> None:
        if not self._processes.active:  # all its processes died while they had nothing to do
            self.close()
            self._processes = self._start()
        self._call(self._processes, jobs, timeout, function, jobs, *more)


def end(processes: ProcessPool) -> None:
    """Kill what runs in a pool, and end it."""
    processes.stop()
    processes.join()
