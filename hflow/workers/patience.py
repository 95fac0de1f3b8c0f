"""Time limits of episodes that stand still while their engine sleeps."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Limit:
    """Cancels a block after so many seconds of an engine that is awake, and raises `TimeoutError`."""

    def __init__(self, patience: Patience, seconds: float | None) -> None:
        self._patience = patience
        self._seconds = seconds or 0.0
        self._clock = None if seconds is None else asyncio.Timeout(None)

    def expired(self) -> bool:
        """Whether it was this limit that ended the block."""
        return self._clock is not None and self._clock.expired()

    async def __aenter__(self) -> Limit:
        if self._clock is not None:
            await self._clock.__aenter__()
            self._patience.begin(self._clock, self._seconds)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._clock is not None:
            self._patience.end(self._clock)
            await self._clock.__aexit__(kind, error, traceback)


class Patience:
    """Limits of the episodes on one engine; all on the event loop's thread. Starts standing still.

    An engine that shares its devices with training sleeps for much of a step, which is no fault
    of the episodes that it interrupted.
    """

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """Limit -> seconds left when time last stood still or began to run."""
        self._runs = False

    def limit(self, seconds: float | None) -> Limit:
        """A limit to enter with `async with`; None: it never ends the block."""
        return Limit(self, seconds)

    def begin(self, clock: asyncio.Timeout, seconds: float) -> None:
        """A limit's clock was entered."""
        self._left[clock] = seconds
        self._schedule(clock)

    def end(self, clock: asyncio.Timeout) -> None:
        """A limit's clock was left."""
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
