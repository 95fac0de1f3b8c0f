"""A server of the Model Context Protocol: on its standard streams, or on the port in its argument."""

import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Context

server = MCPServer("counter")
total = 0


@server.tool()
def add(number: int) -> int:
    """Add a number to the total of this process, and return it."""
    global total
    total += number
    return total


@server.tool()
def divide(a: float, b: float) -> float:
    return a / b


@server.tool()
def clock() -> int:
    return time.monotonic_ns()


@server.tool()
def variable(name: str) -> str:
    return os.environ.get(name, "not set")


@server.tool()
def header(name: str, context: Context) -> str:
    """Return a header of the request."""
    return (context.headers or {}).get(name, "not set")


@server.tool()
def process() -> int:
    return os.getpid()


@server.tool()
def end() -> None:
    print("the counter ends", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def hang() -> None:
    time.sleep(1000)


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
