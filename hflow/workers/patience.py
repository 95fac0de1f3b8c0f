"""Time limits of episodes that stand still while their engine sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Patience:
    """Limits of the episodes on one engine; all on the event loop's thread. Starts standing still.

    An engine that shares its devices with training sleeps for much of a step, which is no fault
    of the episodes that it interrupted.
    """

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """Limit -> seconds left when time last stood still or began to run."""
        self._runs = False

    @asynccontextmanager
    async def limit(self, seconds: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the block after so many seconds of an engine that is awake.

        Raises:
            TimeoutError: when they have passed.
        """
        async with asyncio.timeout(None) as clock:
            if seconds is not None:
                self._left[clock] = seconds
                self._schedule(clock)
            try:
                yield clock
            finally:
                self._left.pop(clock, None)

    def run(self) -> None:
        """The engine is awake."""
        if not self._runs:
            self._runs = True
            for clock in self._left:
                self._schedule(clock)

    def stand(self) -> None:
        """The engine sleeps."""
        now = asyncio.get_running_loop().time()
        self._runs = False
        for clock in self._left:
            if not clock.expired():
                self._left[clock] = max(0.0, (clock.when() or now) - now)
                clock.reschedule(None)

    def _schedule(self, clock: asyncio.Timeout) -> None:
        if self._runs and not clock.expired():
            clock.reschedule(asyncio.get_running_loop().time() + self._left[clock])
