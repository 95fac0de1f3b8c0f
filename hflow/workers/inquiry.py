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
from hflow.workers.hang import Call, elsewhere, report, waiting
from hflow.workers.standing import Standing, StrandedError

GRACE_SECONDS = 1.0
"""How long a collective's failure waits for the error that caused it."""


class WorkerDiedError(RunError):
    """A worker's process ended."""


class Inquiry:
    """Collects the answers of one call.

    Args:
        call: what is done.
        probe: asks a worker where it stands; None: it does not answer. Raises `WorkerDiedError`.
        timeout: seconds after which a collective with a missing rank fails.
    """

    def __init__(
        self, call: Call, probe: Callable[[int], Awaitable[Standing | None]], timeout: float
    ) -> None:
        self._call = call
        self._probe = probe
        self._timeout = timeout
        self._start = time.monotonic()
        self._tasks: dict[int, asyncio.Future[Any]] = {}
        self._known: dict[int, Standing | None] = {}
        """Worker -> what it answered last."""

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
        before, self._known = self._known, await self._ask(self._call.workers)
        if any(self._known[w] is None and before.get(w, Standing()) is None for w in self._known):
            raise RunError(report(self._call, self._timeout, self._known))

    async def _blame(self) -> None:
        """Raise the error that explains the others."""
        if not self._own_errors() and self._seconds < self._timeout:
            await asyncio.wait(self._tasks.values(), timeout=GRACE_SECONDS)
        standings = {} if self._own_errors() else await self._after_failure()
        for error in self._own_errors():
            raise error
        failed = self._failed()
        died = next((error for error in failed.values() if isinstance(error, WorkerDiedError)), None)
        if self._seconds >= self._timeout:
            if died is None or set(waiting(standings)) & set(failed):
                raise RunError(report(self._call, self._timeout, standings))
            others = {worker: standing for worker, standing in standings.items() if worker not in failed}
            raise WorkerDiedError("; ".join([str(died), *elsewhere(self._call, others)]))
        raise died or next(iter(failed.values()))

    def _own_errors(self) -> list[BaseException]:
        """Errors that are not the consequence of what happened to another worker."""
        kinds = (StrandedError, WorkerDiedError)
        return [error for error in self._failed().values() if not isinstance(error, kinds)]

    async def _after_failure(self) -> dict[int, Standing | None]:
        """Where everybody stands; who failed, where it did; who died, where it was last seen."""
        failed = self._failed()
        standings = await self._ask(worker for worker in self._call.workers if worker not in failed)
        answering = [w for w, standing in standings.items() if _is_idle(standing)]
        if sent := [self._tasks[worker] for worker in answering if worker in self._tasks]:
            await asyncio.wait(sent, timeout=GRACE_SECONDS)
        for worker, error in self._failed().items():
            if isinstance(error, StrandedError):
                standings[worker] = error.standing
            elif self._known.get(worker) is not None:
                standings[worker] = self._known[worker]
        return dict(sorted(standings.items()))

    async def _ask(self, workers: Iterable[int]) -> dict[int, Standing | None]:
        asked = list(workers)
        return dict(zip(asked, await asyncio.gather(*map(self._probe, asked)), strict=True))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._start


def _is_idle(standing: Standing | None) -> bool:
    return standing is not None and not standing.doing
