"""`open_tools`: tools of servers that speak the Model Context Protocol, for any episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import MethodType
from typing import Any

from hflow.base.errors import EpisodeError
from hflow.environments.client import RemoteEnvironment, open_environment
from hflow.types.engine import Replay
from hflow.types.sandbox import ToolFailed


class McpTools:
    """The tools of an episode's servers. `await engine.call(tools[name], **arguments)` calls one.

    A tool that reports an error has the error as its result, which the model reads. A server that fails
    refuses the sample.

    Attributes:
        schemas: JSON schemas in the form of OpenAI's API, for `engine.complete(..., tools=tools.schemas)`.
        replay: how calls are treated when the episode is replayed.
    """

    def __init__(self, servers: RemoteEnvironment, schemas: list[dict[str, Any]]) -> None:
        self.schemas = schemas
        self.replay: Replay = servers.replay
        self._servers = servers
        names = [schema["function"]["name"] for schema in schemas]
        self._tools = {name: MethodType(_tool(name), self) for name in names}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return a tool as a function."""
        return self._tools[name]

    async def close(self) -> None:
        """End the servers, or the use of servers that are shared."""
        with suppress(EpisodeError):  # they are killed
            await self._servers.call("close")
        await self._servers.close()


async def open_tools(
    servers: Sequence[str],
    shared: bool = False,
    timeout: float | None = 60.0,
    replay: Replay = "again",
    python: str | None = None,
    requirements: str | None = None,
    start_timeout: float = 300.0,
) -> McpTools:
    """Open the tools of MCP servers: `tools = await engine.environment(open_tools, servers=[...])`.

    Args:
        servers: the knob of `nodes.mcp`.
        shared: the knob of `nodes.mcp`.
        timeout: seconds that starting them, and one call, may take; None: no limit.
        replay: what is done when the episode is replayed, see `Replay`.
        python: path of the interpreter that has the package `mcp`. Default: that of hflow.
        requirements: a file in pip's format, installed once on each machine.
        start_timeout: seconds in which the servers must list their tools, before the run begins.

    Raises:
        ConfigError: if they cannot be started, or their tools cannot be offered to a model.
        EpisodeError: if they cannot be started again.
    """
    settings = {
        "servers": list(servers),
        "shared": shared,
        "python": python,
        "requirements": requirements,
        "start_timeout": start_timeout,
    }
    opened = await open_environment("mcp", settings, {}, timeout, replay)
    try:
        return McpTools(opened, await opened.call("schemas"))
    except BaseException:
        await opened.close()
        raise


def _tool(name: str) -> Callable[..., Any]:
    async def tool(tools: McpTools, /, **arguments: Any) -> str:
        result = await tools._servers.call("call_tool", name=name, arguments=arguments)
        text: str = result["text"]
        if result["is_error"]:
            raise ToolFailed(text)
        return text

    tool.__name__ = tool.__qualname__ = name
    return tool
