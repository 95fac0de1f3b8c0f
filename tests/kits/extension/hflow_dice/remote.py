"""Runs in the other interpreter: a die, and what environments do wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from typing import Any


def load(sides: int, one_process: bool) -> Dice:
    print("a line on stdout", flush=True)
    if sides == 0:
        import a_package_that_is_missing  # noqa: F401
    if sides == 1:
        print("a die with one side\nrolls away", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if sides == 2:
        print("a coin", flush=True)
        time.sleep(1000)
    if sides < 0:
        raise ValueError(f"a die has no {sides} sides\nand no second line")
    return Dice(sides, one_process)


class Dice:
    def __init__(self, sides: int, one_process: bool) -> None:
        self.sides = sides
        self.one_process = one_process

    def open(self, seed: int) -> Die:
        return Die(self.sides, seed)

    def rows(self, size: int) -> list[int]:
        return list(range(size))


class Die:
    def __init__(self, sides: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._sides = sides

    def roll(self) -> int:
        print('{"result": 7}', flush=True)
        return self._random.randint(1, self._sides)

    async def roll_later(self) -> int:
        return self.roll()

    def fail(self) -> None:
        raise RuntimeError("the die rolled\noff the table")

    def no_json(self) -> Any:
        return object()

    def hang(self) -> None:
        time.sleep(1000)

    def kill(self) -> None:
        os.kill(os.getpid(), 9)

    def processes(self) -> list[int]:
        """Start a child in a session of its own. Return its id, and those of this process and its parent."""
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        child = subprocess.Popen(command, start_new_session=True)
        return [child.pid, os.getpid(), os.getppid()]

    def variables(self) -> dict[str, str]:
        return dict(os.environ)
