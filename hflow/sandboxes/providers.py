"""`SandboxProvider`: what runs the calls of tools with a sandbox, and `Sandboxes`, all that an owner uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from hflow.types.sandbox import SANDBOX_PROVIDERS, Sandbox, Tool


class SandboxProvider(Protocol):
    """Runs calls of tools, each one confined to the limits of its tool.

    A provider is built with the most calls of a tool that run at the same time.
    """

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its result. Cancelling the awaiting task ends what runs of the call.

        Args:
            tool: the function.
            limits: the tool's limits.
            arguments: JSON values.

        Raises:
            ToolFailed: when it raised, died or took too long.
            TypeError: when it returned what JSON cannot hold.
            RunError: when the limits cannot be held.
            EpisodeError: when nothing is known of the call.
        """
        ...

    def close(self) -> None:
        """End what runs."""
        ...


class Sandboxes:
    """Runs each tool by the provider that its `@sandbox` names. Providers start with the first such call.

    Args:
        num_calls: most calls of a tool that run at the same time.
    """

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._providers: dict[str, SandboxProvider] = {}

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool, as `SandboxProvider.run` does."""
        return await self._provider(limits.provider).run(tool, limits, arguments)

    def close(self) -> None:
        """End what runs."""
        for provider in self._providers.values():
            provider.close()
        self._providers.clear()

    def _provider(self, name: str) -> SandboxProvider:
        provider = self._providers.get(name)
        if provider is None:
            provider = self._providers[name] = SANDBOX_PROVIDERS.load(name)(self._num_calls)
        return provider


@cache
def sandboxes_of_process() -> Sandboxes:
    """Return the sandboxes that all bodies of this process share. They end with the process."""
    return Sandboxes(len(os.sched_getaffinity(0)))
