"""Tools that tests call in sandboxes. This module imports little, as each server of a tool imports it."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from typing import Any


def calculator(expression: str) -> str:
    return str(eval(expression, {"__builtins__": {}}))


def double(number: int) -> int:
    return 2 * number


def endless() -> None:
    while True:
        pass


def hungry(mib: int) -> int:
    return len(bytearray(mib * 2**20))


def dying() -> None:
    os._exit(7)


async def patient(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


def unsendable() -> Any:
    return lambda: 0


def fetch(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=2) as answer:
        return int(answer.status)


def sleep() -> None:
    time.sleep(600)


def execute(code: str) -> Any:
    """Run code, as a model may write it."""
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope.get("result")


def execute_more(code: str) -> Any:
    return execute(code)


def busy(seconds: float) -> bool:
    while time.process_time() < seconds:
        pass
    return True
