"""`SandboxProvider`: what runs the calls of tools with a sandbox, and `Sandboxes`, all that an owner uses."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Protocol

from hflow.base.errors import RunError
from hflow.sandboxes.calls import name_of
from hflow.types.sandbox import SANDBOX_PROVIDERS, Sandbox, Tool


class SandboxProvider(Protocol):
    """Runs calls of tools, each one confined to the limits of its tool.

    A provider is built with the most calls of a tool that run at the same time.
    """

    @staticmethod
    def find_problem(limits: Sandbox) -> str | None:
        """Return the reason why calls with these limits cannot run here, with a fix; None if they can.

        A run calls it before models load. It is quick: it looks for a program, a package or a variable.
        """
        ...

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool with JSON values and return its result. Cancelling the awaiting task ends the call.

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
    """Runs each tool by the provider that its `@sandbox` names. Providers start with the first such call."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._providers: dict[str, SandboxProvider] = {}
        self._checked: set[Sandbox] = set()

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool, as `SandboxProvider.run` does.

        Raises:
            RunError: also when its provider cannot run here.
        """
        return await self._provider(tool, limits).run(tool, limits, arguments)

    def close(self) -> None:
        """End what runs."""
        for provider in self._providers.values():
            provider.close()
        self._providers.clear()

    def _provider(self, tool: Tool, limits: Sandbox) -> SandboxProvider:
        if limits not in self._checked:
            if (problem := find_problem(limits)) is not None:
                raise RunError(f"the sandbox of {name_of(tool)} cannot be made: {problem}")
            self._checked.add(limits)
        provider = self._providers.get(limits.provider)
        if provider is None:
            provider = SANDBOX_PROVIDERS.load(limits.provider)(self._num_calls)
            self._providers[limits.provider] = provider
        return provider


def find_problem(limits: Sandbox) -> str | None:
    """Return the reason why the provider of these limits cannot run here; None if it can."""
    problem: str | None = SANDBOX_PROVIDERS.load(limits.provider).find_problem(limits)
    return problem


@cache
def sandboxes_of_process() -> Sandboxes:
    """Return the sandboxes that all bodies of this process share. They end with the process."""
    return Sandboxes(len(os.sched_getaffinity(0)))
