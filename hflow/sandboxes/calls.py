"""What providers share: the number of calls at the same time, and the meaning of replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hflow.base.secrets import mask_secrets
from hflow.types.sandbox import Sandbox, Tool, ToolFailed

START_SECONDS = 120.0
"""Longest wait for a call's process, container or machine to start, and to import the tool's module."""
LONGEST_STRETCH = 10
"""How many times its timeout a call may take in all, if it waits for a processor meanwhile."""
LONGEST_REPLY = 64 * 2**20
"""Most bytes of a reply, which is JSON."""


class CallPlaces:
    """The places of the calls of each tool, `num_calls` for each. A call waits until one is free."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._places: dict[tuple[Tool, Sandbox], tuple[asyncio.AbstractEventLoop, asyncio.Semaphore]] = {}

    def of(self, tool: Tool, limits: Sandbox) -> asyncio.Semaphore:
        """Return the semaphore of a tool on this event loop."""
        loop = asyncio.get_running_loop()
        owner, free = self._places.get((tool, limits), (None, None))
        if free is None or owner is not loop:
            free = asyncio.Semaphore(self._num_calls)
            self._places[tool, limits] = loop, free
        return free


def parse_reply(reply: bytes) -> tuple[str, Any]:
    """Return the kind and the value of a reply, which model-written code may have forged.

    Raises:
        ToolFailed: when it is empty or no reply.
    """
    if not reply:
        raise ToolFailed("its process died")
    try:
        kind, value = json.loads(reply)
    except (ValueError, TypeError, RecursionError):
        raise ToolFailed("its process wrote no valid reply") from None
    return str(kind), value


def result_of(tool: Tool, kind: str, value: Any) -> Any:
    """Return the result in a reply whose call was not lost.

    Raises:
        ToolFailed: when the tool failed.
        TypeError: when its result cannot be JSON.
    """
    if kind == "no JSON":
        raise TypeError(
            f"what {name_of(tool)} returned cannot be recorded in the episode's journal: {value}. Use text, "
            "numbers, and lists and dicts of them."
        )
    if kind != "result":
        raise ToolFailed(mask_secrets(str(value)))
    return value


def name_of(tool: Tool) -> str:
    """Return a tool's name for messages."""
    return getattr(tool, "__name__", "a tool")
