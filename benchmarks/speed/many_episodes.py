"""Episodes of an environment at once on one machine, each with a process of its own, beside an event loop.

Opens FrozenLake of gymnasium many times at once, plays, and closes. Says how long that takes, how late the
event loop was at most, how much memory a game takes, and how many processes remain.

    python -m benchmarks.speed.many_episodes --python PATH --episodes 1000
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.lib import harness
from hflow.environments.client import RemoteEnvironment, close_hosts, open_environment

TICK = 0.01
STEPS = 10


class Lateness:
    """The longest delay of an event loop, while the block runs.

    Attributes:
        seconds: the delay.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    async def __aenter__(self) -> Lateness:
        self._task = asyncio.ensure_future(self._watch())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(TICK)
            self.seconds = max(self.seconds, time.perf_counter() - start - TICK)


def processes() -> list[psutil.Process]:
    """Return the processes that this one has started, and theirs."""
    return psutil.Process().children(recursive=True)


def memory() -> int:
    """Return the bytes of these processes; what several share is divided among them."""
    total = 0
    for process in processes():
        with suppress(psutil.NoSuchProcess):
            total += process.memory_full_info().pss
    return total


async def measure(python: str, num: int) -> dict[str, Any]:
    """Open, play and close `num` games."""
    settings = {"id": "FrozenLake-v1", "python": python}

    async def open_game(seed: int) -> RemoteEnvironment:
        arguments = {"seed": seed, "instructions": "Play."}
        return await open_environment("gymnasium", settings, arguments, 600.0)

    async def play(game: RemoteEnvironment) -> None:
        for step in range(STEPS):
            await game.call("step", reply=str(step % 4))

    first = await open_game(0)
    server = memory()
    seconds: dict[str, float] = {}
    async with Lateness() as late:
        start = time.perf_counter()
        games = await asyncio.gather(*(open_game(seed) for seed in range(num)))
        seconds["open"] = time.perf_counter() - start
        start = time.perf_counter()
        await asyncio.gather(*map(play, games))
        seconds["play"] = time.perf_counter() - start
    mib = (memory() - server) / num / 2**20
    start = time.perf_counter()
    await asyncio.gather(*(game.close() for game in (first, *games)))
    close_hosts()
    while processes():
        await asyncio.sleep(TICK)
    seconds["close"] = time.perf_counter() - start
    return {"episodes": num, "steps": num * STEPS, "seconds": seconds, "late": late.seconds, "mib": mib}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="an interpreter with gymnasium")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    row = asyncio.run(measure(args.python, args.episodes))
    print(row)
    print(harness.write("many-episodes", row, args.out))


if __name__ == "__main__":
    main()
