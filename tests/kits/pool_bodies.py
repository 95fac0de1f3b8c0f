"""Bodies for tests of their pool. Its processes import this module, so it imports little."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np


def double(x: int) -> int:
    return 2 * x


def fail_on_odd(x: int) -> int:
    if x % 2:
        raise ValueError(f"{x} is odd")
    return x


def hang_on_seven(x: int) -> int:
    while x == 7:
        pass
    return x


def die_on_five(x: int) -> int:
    import os

    if x == 5:
        os._exit(3)
    return x


class Counted:
    """A body with a setup, which writes a mark and may fail."""

    def __init__(self, marks: str, problem: str = "") -> None:
        self.marks, self.problem = marks, problem
        self.__hflow_setup__ = self.setup

    def setup(self) -> None:
        if self.problem:
            raise OSError(self.problem)
        Path(self.marks, str(os.getpid())).touch()

    def __call__(self, x: int) -> int:
        return hang_on_seven(x) + os.getpid()


def print_and_fail(x: int) -> int:
    import sys

    print("é" * 3000)
    print("begun", end="")
    print("", x, file=sys.stderr)
    print("not ended", end="")
    if x == 0:
        os._exit(1)
    raise ValueError("two\nlines")


def loaded_modules(x: int) -> list[str]:
    import sys

    return [name for name in ("torch", "ray", "transformers", "pyarrow") if name in sys.modules]


def unpicklable(x: int) -> Any:
    return (lambda: x) if x == 1 else x


def third_time(marks: str, x: int) -> int:
    mark = Path(marks) / str(x)
    tries = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (tries + 1))
    if tries < 2:
        raise OSError("not yet")
    return tries


async def sleepy(x: int) -> int:
    import asyncio

    await asyncio.sleep(60 if x == 3 else 0.01)
    return x


async def blocking(x: int) -> int:
    import time

    if x == 2:
        time.sleep(60)
    return x


async def num_together(x: int) -> int:
    import asyncio

    global _together
    _together = globals().get("_together", 0) + 1
    seen = _together
    await asyncio.sleep(0.02)
    _together -= 1
    return seen


def killed_twice(marks: str, x: int) -> int:
    import os

    mark = Path(marks) / str(x)
    tries = len(mark.read_text()) if mark.exists() else 0
    if x == 1 and tries < 3:
        mark.write_text("x" * (tries + 1))
        os.kill(os.getpid(), 9)
    return tries


def own_pid(x: int) -> int:
    import os

    return os.getpid()


def slow_on_hundreds(x: int) -> int:
    import time

    while x % 100 == 0:
        time.sleep(0.1)
    return x


def slow_on_twentieths(x: int) -> int:
    import time

    while x % 20 == 0:
        time.sleep(0.1)
    return x


def two_seconds(marks: str, x: int) -> int:
    import time

    with (Path(marks) / str(x)).open("a") as file:
        file.write("x")
    time.sleep(2)
    return x


def draw(x: int) -> tuple[float, float]:
    return random.random(), float(np.random.rand())


async def dies_on_four(x: int) -> int:
    import asyncio
    import os

    await asyncio.sleep(0.05)
    if x == 4:
        os.kill(os.getpid(), 9)
    return x
