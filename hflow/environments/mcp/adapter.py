"""`nodes.mcp`: a model converses with the tools of servers that speak the Model Context Protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hflow.base.errors import ConfigError
from hflow.dsl import generate
from hflow.environments.interface import Adapter, HostSettings, read_host_settings
from hflow.environments.mcp.tools import open_tools
from hflow.types import Engine, Messages, Trajectory


@generate()
async def mcp(
    engine: Engine,
    prompt: Messages,
    *,
    servers: tuple[str, ...] = (),
    shared: bool = False,
    max_steps: int = 8,
    step_timeout: float = 60.0,
    replay: Literal["again", "recorded", "never"] = "again",
    python: str | None = None,
    requirements: str | None = None,
    start_timeout: float = 300.0,
) -> Trajectory:
    """Answer a prompt with the tools of MCP servers.

    Args:
        engine: generates the replies.
        prompt: the messages so far. A text is one message of the user.
        servers: the servers: command lines that start one, such as `mcp-server-time` or
            `TOKEN=$TOKEN npx -y my-server`, or URLs of servers that run. A URL with headers is an object as
            JSON: `{"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer $TOKEN"}}`.
        shared: whether the episodes of a worker share servers and connections, which is cheap and right for
            tools that remember nothing. Otherwise each episode has its own.
        max_steps: most replies of an episode.
        step_timeout: seconds that starting the servers, and one call, may take.
        replay: what an episode does that is interrupted: `again` starts the servers and makes the calls
            again, `recorded` returns their recorded results, for tools that change nothing; `never` begins
            again.
        python: path of the interpreter that has the package `mcp`. Commands find its programs first. Default:
            that of hflow.
        requirements: a file in pip's format, installed once on each machine.
        start_timeout: seconds in which the servers must list their tools, before the run begins.
    """
    tools: Any = await engine.environment(
        open_tools,
        servers=list(servers),
        shared=shared,
        timeout=step_timeout,
        replay=replay,
        python=python,
        requirements=requirements,
        start_timeout=start_timeout,
    )
    talk = await engine.complete(prompt, tools=tools.schemas)
    for _ in range(max_steps - 1):
        if not talk.tool_calls:
            break
        for call in talk.tool_calls:
            talk = talk.add("tool", await engine.call(tools[call.name], **call.arguments))
        talk = await engine.complete(talk)
    return talk


def _host_settings(knobs: Mapping[str, Any]) -> HostSettings:
    if not knobs.get("servers"):
        raise ConfigError("set servers to command lines or URLs of MCP servers, such as ['mcp-server-time']")
    load = {"servers": list(knobs["servers"]), "shared": bool(knobs.get("shared", False))}
    return read_host_settings(__file__, load, "'mcp>=2.3,<3'", knobs)


ADAPTER = Adapter("mcp", mcp, _host_settings)
