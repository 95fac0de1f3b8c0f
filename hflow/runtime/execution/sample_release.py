"""`SampleRelease` frees data on workers, and waits while a checkpoint copies it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hflow.workers.interface import Workers


class SampleRelease:
    """Frees the data of samples.

    Args:
        workers: hold the data.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._is_allowed = asyncio.Event()
        self._is_allowed.set()

    def hold(self) -> None:
        """Free nothing until `go_on` is called."""
        self._is_allowed.clear()

    def go_on(self) -> None:
        """Free what had to wait."""
        self._is_allowed.set()

    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """Free fields of samples on a worker; see `Workers.release`."""
        await self._is_allowed.wait()
        await self._workers.release(worker, samples, stream, fields)
