"""Waits for the answers of workers that act together, and finds out who keeps the others waiting.

A collective whose ranks do not all come fails on those that wait (gloo), or ends their processes (NCCL).
Either way nobody knows why but the one that did not come, so everybody is asked where it stands. As a
process that was ended cannot be asked, all are also asked whenever nothing was heard for the timeout.
A node that takes long ends nothing by itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from hflow.errors import RunError
from hflow.workers.hangs.hang_report import WorkerCall, elsewhere, report, waiting
from hflow.workers.hangs.stack_probe import StackSnapshot, StrandedError

GRACE_SECONDS = 1.0
"""How long a collective's failure waits for the error that caused it."""


class WorkerDiedError(RunError):
    """A worker's process ended."""


class HangDetector:
    """Collects the answers of one call.

    Args:
        call: what is done.
        probe: asks a worker where it stands; None: it does not answer. Raises `WorkerDiedError`.
        timeout: seconds after which a collective with a missing rank fails.
    """

    def __init__(
        self, call: WorkerCall, probe: Callable[[int], Awaitable[StackSnapshot | None]], timeout: float
    ) -> None:
        self._call = call
        self._probe = probe
        self._timeout = timeout
        self._start = time.monotonic()
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._known: dict[int, StackSnapshot | None] = {}
        """Worker -> what it answered when nothing had been heard for the timeout, at last."""
        self._dead: dict[int, WorkerDiedError] = {}
        """Workers that were found dead when they were asked."""

    async def collect(self, sent: Mapping[int, Awaitable[Any]]) -> list[Any]:
        """The answers, in the order of `sent`.

        Raises:
            RunError: the first error, or who is missing where that was a collective's.
        """
        self._tasks = {worker: asyncio.ensure_future(answer) for worker, answer in sent.items()}
        try:
            left = set(self._tasks.values())
            while left:
                _, left = await asyncio.wait(left, timeout=self._timeout, return_when=asyncio.FIRST_EXCEPTION)
                if self._failed():
                    await self._blame()
                elif left:
                    await self._look()
            return [task.result() for task in self._tasks.values()]
        finally:
            self._failed()  # or asyncio would complain that nobody asked for their errors
            for task in self._tasks.values():
                task.cancel()

    def _failed(self) -> dict[int, BaseException]:
        done = {worker: task for worker, task in self._tasks.items() if task.done()}
        errors = {worker: task.exception() for worker, task in done.items()}
        return {worker: error for worker, error in errors.items() if error is not None}

    async def _look(self) -> None:
        """Note where everybody stands.

        Raises:
            RunError: when a worker does not answer for the second time.
        """
        before, found = self._known, await self._ask(self._call.workers)
        self._known = {**before, **found}
        if any(now is None and before.get(worker, StackSnapshot()) is None for worker, now in found.items()):
            waiters = waiting(self._known)
            concerned = {w: where for w, where in self._known.items() if where is None or w in waiters}
            raise RunError(report(self._call, self._timeout, concerned))

    async def _blame(self) -> None:
        """Raise the error that explains the others."""
        is_late = time.monotonic() - self._start >= self._timeout
        if not self._own_errors() and not is_late:
            await asyncio.wait(self._tasks.values(), timeout=GRACE_SECONDS)
        standings = {} if self._own_errors() else await self._after_failure()
        for error in self._own_errors():
            raise error
        dead = self._gone()
        if is_late and (not dead or self._waited(dead, standings)):
            raise RunError(report(self._call, self._timeout, standings))
        for died in dead.values():
            others = {worker: where for worker, where in standings.items() if worker not in dead}
            places = elsewhere(self._call, others) if is_late else []
            raise WorkerDiedError("; ".join([str(died), *places]))
        raise next(iter(self._failed().values()))

    def _gone(self) -> dict[int, WorkerDiedError]:
        """Workers whose processes ended."""
        failed = self._failed().items()
        return {**self._dead, **{w: error for w, error in failed if isinstance(error, WorkerDiedError)}}

    def _waited(self, dead: Iterable[int], standings: Mapping[int, StackSnapshot | None]) -> bool:
        """Whether who died waited when it was last asked, and nobody else went on since then."""
        left = {worker: where for worker, where in standings.items() if worker not in dead}
        stood = all(
            where is not None and was is not None and where.counts == was.counts
            for worker, where in left.items()
            for was in [self._known.get(worker)]
        )
        return stood and not set(dead).isdisjoint(waiting(standings))

    def _own_errors(self) -> list[BaseException]:
        """Errors that are not the consequence of what happened to another worker."""
        kinds = (StrandedError, WorkerDiedError)
        return [error for error in self._failed().values() if not isinstance(error, kinds)]

    async def _after_failure(self) -> dict[int, StackSnapshot | None]:
        """Where everybody stands; who failed, where it did; who died, where it was last seen."""
        failed = self._failed()
        standings = await self._ask(worker for worker in self._call.workers if worker not in failed)
        answering = [w for w, standing in standings.items() if _is_idle(standing)]
        if sent := [self._tasks[worker] for worker in answering if worker in self._tasks]:
            await asyncio.wait(sent, timeout=GRACE_SECONDS)
        for worker, error in self._failed().items():
            if isinstance(error, StrandedError):
                standings[worker] = error.standing
        seen = {worker: self._known[worker] for worker in self._gone() if worker in self._known}
        return dict(sorted({**standings, **seen}.items()))

    async def _ask(self, workers: Iterable[int]) -> dict[int, StackSnapshot | None]:
        """Where these workers stand, but for those that turn out to be dead."""
        asked = list(workers)
        answers = await asyncio.gather(*map(self._probe, asked), return_exceptions=True)
        found: dict[int, StackSnapshot | None] = {}
        for worker, answer in zip(asked, answers, strict=True):
            if isinstance(answer, WorkerDiedError):
                self._dead[worker] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[worker] = answer
        return found


def _is_idle(standing: StackSnapshot | None) -> bool:
    return standing is not None and not standing.doing
