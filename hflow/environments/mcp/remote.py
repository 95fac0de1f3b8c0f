"""Runs in the interpreter that has mcp: starts servers, reads the schemas of their tools, and calls them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import sys
import tempfile
from contextlib import AsyncExitStack
from typing import Any

_INVALID_PARAMS = -32602
"""The code with which servers refuse a call that the model has written."""


def load(servers: list[str], shared: bool) -> Servers:
    """Start each server, check its tools, and end it."""
    import mcp  # noqa: F401 - the sessions begin as copies of this process

    os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    opened = SharedServers(servers) if shared else Servers(servers)
    asyncio.run(opened.check())
    return opened


class Servers:
    """Opens connections to servers, new ones for each episode."""

    def __init__(self, servers: list[str]) -> None:
        self._servers = servers

    async def check(self) -> None:
        """Open all servers once."""
        tools = await self._start()
        await tools.close()

    async def open(self) -> Tools | SharedTools:
        """Start the servers of an episode, and connect to those that run."""
        return await self._start()

    async def _start(self) -> Tools:
        tools = Tools(self._servers)
        try:
            await tools.start()
        except BaseException:
            await tools.close()
            raise
        return tools


class SharedServers(Servers):
    """Opens connections to servers that all episodes share, again after one of them has ended."""

    one_process = True

    def __init__(self, servers: list[str]) -> None:
        super().__init__(servers)
        self._opening = asyncio.Lock()
        self._tools: Tools | None = None

    async def open(self) -> SharedTools:
        """Return the tools of the servers, which are started if they do not run."""
        async with self._opening:
            if self._tools is None or self._tools.is_broken:
                self._tools = await self._start()
            return SharedTools(self._tools)


class Tools:
    """The tools of servers that are open."""

    def __init__(self, servers: list[str]) -> None:
        self._servers = [_Server(server) for server in servers]
        self._owners: dict[str, _Server] = {}
        self._schemas: list[dict[str, Any]] = []
        self.num_users = 0
        """Episodes that share them."""

    @property
    def is_broken(self) -> bool:
        """Return whether a server cannot be used any more."""
        return any(server.is_broken for server in self._servers)

    async def start(self) -> None:
        """Start all servers and read their tools.

        Raises:
            ValueError: for a server that cannot be used, and for tools without a schema or with equal names.
        """
        for server in self._servers:
            print(f"waiting for the tools of {server.name}")  # noqa: T201 - the last line if it takes too long
            for tool in await server.start():
                self._add(server, tool)
        if not self._owners:
            raise ValueError("the servers have no tools")

    def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools in the form of OpenAI's API."""
        return self._schemas

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Return its text, and whether it says that it failed."""
        return await self._owners[name].call_tool(name, arguments)

    async def close(self) -> None:
        """End the servers that were started, as the protocol says."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def _add(self, server: _Server, tool: Any) -> None:
        from jsonschema import Draft202012Validator, SchemaError

        name, schema = tool.name, tool.input_schema
        if name in self._owners:
            raise ValueError(
                f"{server.name} and {self._owners[name].name} both have a tool {name}; leave out one of them"
            )
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as error:
            raise ValueError(
                f"the tool {name} of {server.name} has an invalid schema: {error.message}"
            ) from None
        self._owners[name] = server
        function = {"name": name, "description": tool.description or "", "parameters": schema}
        self._schemas.append({"type": "function", "function": function})


class SharedTools:
    """The tools of servers that other episodes use, too."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._is_closed = False
        tools.num_users += 1

    async def schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of all tools in the form of OpenAI's API."""
        return self._tools.schemas()

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Return its text, and whether it says that it failed."""
        return await self._tools.call_tool(name, arguments)

    async def close(self) -> None:
        """Leave the servers open, unless they are broken and no other episode uses them."""
        if not self._is_closed:
            self._is_closed = True
            self._tools.num_users -= 1
            if self._tools.is_broken and not self._tools.num_users:
                await self._tools.close()


class _Server:
    """A connection to a server: a URL, an object with `url` and `headers` as JSON, or a command line.

    Variables in front of a command are the server's, as in a shell.

    Raises:
        ValueError: if it is none of them.
    """

    def __init__(self, server: str) -> None:
        self.name = f"the server {server!r}"
        self._headers: dict[str, str] = {}
        if server.lstrip().startswith("{"):
            server, self._headers = self._read_object(server)
            self.name = f"the server {server!r}"
        self._url = server if re.match("https?://", server) else ""
        self._command, self._variables = ([], {}) if self._url else self._read_command(server)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - until `close`
        self._closing = asyncio.Event()
        self._running: asyncio.Future[None] | None = None
        self._client: Any = None
        self.is_broken = False
        """Whether its connection has ended, or a call was given up."""

    async def start(self) -> list[Any]:
        ready = asyncio.Event()
        self._running = asyncio.ensure_future(self._run(ready))
        await self._finish(ready.wait())
        tools: list[Any] = await self._finish(self._list_tools())
        return tools

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool. Return its text, and whether it says that it failed."""
        from mcp import MCPError

        try:
            result = await self._finish(self._client.call_tool(name, arguments))
        except MCPError as error:
            return {"text": str(error), "is_error": True}
        texts = [self._text(name, block) for block in result.content]
        if not texts and result.structured_content is not None:
            texts = [json.dumps(result.structured_content)]
        return {"text": "\n".join(texts), "is_error": bool(result.is_error)}

    async def close(self) -> None:
        if self._running is not None:
            self._closing.set()
            await asyncio.wait([self._running])
            self._running.exception()  # it was reported, or no longer matters
        self._log.close()

    async def _run(self, ready: asyncio.Event) -> None:
        """Hold the connection, in one task from its beginning to its end."""
        from mcp import Client, StdioServerParameters, stdio_client

        async with AsyncExitStack() as stack:
            server: Any = self._url
            if self._headers:
                from httpx2 import AsyncClient
                from mcp.client.streamable_http import streamable_http_client

                client = await stack.enter_async_context(AsyncClient(headers=self._headers, timeout=None))
                server = streamable_http_client(self._url, http_client=client)
            elif not self._url:
                command, *arguments = self._command
                settings = StdioServerParameters(command=command, args=arguments, env=self._variables)
                server = stdio_client(settings, self._log)
            self._client = await stack.enter_async_context(Client(server))
            ready.set()
            await self._closing.wait()

    async def _list_tools(self) -> list[Any]:
        tools, cursor = [], None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def _finish(self, request: Any) -> Any:
        """Return the result of a request, unless the connection ends first.

        Raises:
            ConnectionError: with the reason, if it does.
            MCPError: with the server's reason, if it refuses the parameters.
        """
        from mcp import MCPError

        assert self._running is not None
        answer = asyncio.ensure_future(request)
        try:
            await asyncio.wait([answer, self._running], return_when=asyncio.FIRST_COMPLETED)
            error = answer.exception() if answer.done() else self._running.exception()
            if answer.done() and error is None:
                return answer.result()
        except asyncio.CancelledError:
            self.is_broken = True
            raise
        finally:
            answer.cancel()
        if isinstance(error, MCPError) and error.code == _INVALID_PARAMS:
            raise error
        raise self._failure(error)

    def _failure(self, error: BaseException | None) -> ConnectionError:
        """Return the reason for which the server cannot be used, with what it printed last."""
        self.is_broken = True
        error = _first(error)
        if isinstance(error, FileNotFoundError):
            return ConnectionError(f"{self.name} cannot be started: there is no program {self._command[0]!r}")
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        printed = f"; its last line: {lines[-1]}" if lines else ""
        return ConnectionError(f"{self.name} cannot be used: {error or type(error).__name__}{printed}")

    def _text(self, tool: str, block: Any) -> str:
        if block.type == "text":
            return str(block.text)
        if block.type == "resource_link":
            return str(block.uri)
        text = getattr(getattr(block, "resource", None), "text", None)
        if text is None:
            raise ValueError(f"the tool {tool} of {self.name} returned {block.type} and no text")
        return str(text)

    def _read_object(self, server: str) -> tuple[str, dict[str, str]]:
        """Return the URL and the headers of a server, with the values of the variables that headers name."""
        try:
            entry = json.loads(server)
        except ValueError as error:
            raise ValueError(f"{self.name} is no JSON: {error}") from None
        url, headers = entry.pop("url", ""), entry.pop("headers", {})
        if entry or not re.match("https?://", str(url)) or not isinstance(headers, dict):
            raise ValueError(f'{self.name} must be {{"url": "https://...", "headers": {{"NAME": "VALUE"}}}}')
        return url, {name: self._expand(name, str(value)) for name, value in headers.items()}

    def _expand(self, name: str, value: str) -> str:
        """Replace the environment variables that a value names, `$NAME` or `${NAME}`, by theirs."""
        for variable in re.findall(r"\$\{?([A-Za-z_]\w*)", value):
            if variable not in os.environ:
                raise ValueError(
                    f"{name} of {self.name} needs the environment variable {variable}; set it on each machine"
                )
        return os.path.expandvars(value)

    def _read_command(self, server: str) -> tuple[list[str], dict[str, str]]:
        try:
            words = shlex.split(server)
        except ValueError as error:
            raise ValueError(f"{self.name} is no command line: {error}") from None
        variables = {}
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = self._expand(name, value)
        if not words:
            raise ValueError(f"{self.name} has no command; write a command line or a URL")
        return words, variables


def _first(error: Any) -> Any:
    """Return the first error of a group of them, else the error."""
    while getattr(error, "exceptions", None):
        error = error.exceptions[0]
    return error
