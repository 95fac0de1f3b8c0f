"""`SandboxProvider`: what runs the calls of tools with a sandbox."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from hflow.sandboxes.sandboxes import Sandboxes, Tool
from hflow.types.sandbox import Sandbox


class SandboxProvider(Protocol):
    """Runs calls of tools, each one confined to the limits of its tool."""

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its result. Cancelling the awaiting task ends what runs of the call.

        Args:
            tool: the function.
            limits: the tool's limits.
            arguments: JSON values.

        Raises:
            ToolFailed: when it raised, died or took too long.
            TypeError: when it returned what JSON cannot hold.
            RunError: when no sandbox can be made for it.
            EpisodeError: when nothing is known of the call.
        """
        ...

    def close(self) -> None:
        """End what runs."""
        ...


def sandboxes(num_calls: int) -> SandboxProvider:
    """Return new sandboxes, which run at most `num_calls` calls of a tool at the same time."""
    return Sandboxes(num_calls)


async def call_in_process(tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
    """Call a tool in the sandboxes that all bodies of this process share. They end with the process."""
    return await _sandboxes_of_process().run(tool, limits, arguments)


@cache
def _sandboxes_of_process() -> SandboxProvider:
    return sandboxes(len(os.sched_getaffinity(0)))
