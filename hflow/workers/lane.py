"""What the two lanes of the pool have in common: killable calls and their returns."""

from __future__ import annotations

import abc
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hflow.workers.pool_child import Job, Outcome, too_long


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
        if isinstance(self.future.exception(), TimeoutError | ProcessExpired | BrokenProcessPool):
            return None
        outcomes: list[Outcome] = pickle.loads(self.future.result())
        return outcomes

    def blame(self, job: Job) -> Outcome:
        """The outcome of the one job that its process was killed for, or died of."""
        error = self.future.exception()
        if isinstance(error, TimeoutError):
            return Outcome(job.node, job.key, reason="timeout", message=too_long(job.timeout), killed=True)
        code = f" (exit code {error.exitcode})" if isinstance(error, ProcessExpired) else ""
        return Outcome(job.node, job.key, reason="failed", message=f"its process died{code}", killed=True)


class Lane(abc.ABC):
    """A queue of jobs in front of a process pool; used by the pool's thread only."""

    def __init__(self, start: Callable[[], ProcessPool], on_return: Callable[[Return], None]) -> None:
        self._start = start
        self._processes = start()
        self._on_return = on_return
        self._suspects: deque[Job] = deque()
        """Jobs that were in a process that was killed or died: they run alone."""

    @abc.abstractmethod
    def queue(self, job: Job) -> None:
        """Take a job."""

    def queue_alone(self, job: Job) -> None:
        """Take a job that shares its process with no other while it runs."""
        self._suspects.append(job)

    @abc.abstractmethod
    def pump(self) -> None:
        """Start what can be started."""

    @abc.abstractmethod
    def settle(self, returned: Return) -> list[tuple[Job, Outcome]]:
        """The jobs that a return ended; the others are queued again."""

    def start(self) -> None:
        """Start the processes before the first job comes."""
        assert self._processes.active

    def close(self) -> None:
        """End the processes."""
        self._processes.stop()
        self._processes.join()

    def _call(
        self, jobs: Sequence[Job], timeout: float | None, function: Callable[..., bytes], *arguments: Any
    ) -> None:
        if not self._processes.active:  # all its processes died while they had nothing to do
            self.close()
            self._processes = self._start()
        future = self._processes.schedule(function, args=(jobs, *arguments), timeout=timeout)
        future.add_done_callback(partial(self._returned, jobs))

    def _returned(self, jobs: Sequence[Job], future: Future[bytes]) -> None:
        self._on_return(Return(self, jobs, future))
