"""Tools in processes of their own: limits, network, death, cancellation."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pebble import ProcessPool

from hflow import sandbox
from hflow.types.sandbox import sandbox_of
from hflow.workers.forkserver import CleanContext
from hflow.workers.generation.sandbox_child import refuse_network
from hflow.workers.generation.sandboxes import Sandboxes, ToolFailed


@sandbox(timeout=5.0, memory_mb=256)
def calculator(expression: str) -> str:
    return str(eval(expression, {"__builtins__": {}}))


@sandbox(timeout=0.3)
def endless() -> None:
    while True:
        pass


@sandbox(timeout=5.0, memory_mb=64)
def hungry(mib: int) -> int:
    return len(bytearray(mib * 2**20))


@sandbox()
def dying() -> None:
    os._exit(7)


@sandbox()
async def patient(seconds: float) -> int:
    await asyncio.sleep(seconds)
    return os.getpid()


@sandbox()
def unsendable() -> Any:
    return lambda: 0


@sandbox(timeout=5.0)
def fetch(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=2) as answer:
        return int(answer.status)


@sandbox(timeout=30.0)
def slow_write(path: str) -> None:
    Path(path).write_text("begun")
    time.sleep(20)
    Path(path).write_text("ended")


async def call(sandboxes: Sandboxes, tool: Callable[..., Any], **arguments: Any) -> Any:
    limits = sandbox_of(tool)
    assert limits is not None
    return await sandboxes.run(tool, limits, arguments)


def run(work: Callable[[Sandboxes], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        sandboxes = Sandboxes(1)
        try:
            async with asyncio.timeout(60):
                return await work(sandboxes)
        finally:
            sandboxes.close()

    return asyncio.run(main())


def failure(tool: Callable[..., Any], **arguments: Any) -> str:
    with pytest.raises(ToolFailed) as caught:
        run(lambda sandboxes: call(sandboxes, tool, **arguments))
    return str(caught.value)


def test_results_come_back() -> None:
    async def work(sandboxes: Sandboxes) -> list[Any]:
        calls = [call(sandboxes, calculator, expression=f"{i} * 2") for i in range(20)]
        return [*await asyncio.gather(*calls), await call(sandboxes, patient, seconds=0.0)]

    *doubled, pid = run(work)
    assert doubled == [str(2 * i) for i in range(20)]
    assert pid != os.getpid()


def test_an_error_of_a_tool_is_reported_in_one_line() -> None:
    assert failure(calculator, expression="1 / 0") == "ZeroDivisionError: division by zero"
    assert failure(calculator, expression="__import__('os')").startswith("NameError: ")
    assert failure(calculator, other="1").startswith("TypeError: calculator() got an unexpected keyword")
    assert "pickle" in failure(unsendable)


def test_limits_hold_and_the_next_call_works() -> None:
    async def work(sandboxes: Sandboxes) -> int:
        with pytest.raises(ToolFailed, match=r"took longer than its timeout of 0.3 s"):
            await call(sandboxes, endless)
        with pytest.raises(ToolFailed, match="its process died"):
            await call(sandboxes, dying)
        with pytest.raises(ToolFailed, match="its process died"):
            await call(sandboxes, dying)
        with pytest.raises(ToolFailed, match="MemoryError"):
            await call(sandboxes, hungry, mib=100)
        return int(await call(sandboxes, hungry, mib=10))

    assert run(work) == 10 * 2**20


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = failure(fetch, port=server.getsockname()[1])
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert said.startswith("URLError: ")


def test_a_cancelled_call_ends_its_process(tmp_path: Path) -> None:
    path = tmp_path / "said"

    async def work(sandboxes: Sandboxes) -> str:
        task = asyncio.ensure_future(call(sandboxes, slow_write, path=str(path)))
        while not path.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        limits = sandbox_of(slow_write)
        assert limits is not None
        with pytest.raises(ToolFailed, match="TypeError"):  # the one process is free again
            await call(sandboxes, slow_write)
        return path.read_text()

    assert run(work) == "begun"


def test_child_processes_import_neither_torch_nor_ray() -> None:
    modules = "hflow.workers.bodies.pool_child, hflow.workers.generation.sandbox_child"
    code = f"import sys, {modules}; print([name for name in ('torch', 'ray') if name in sys.modules])"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"


def hooked() -> None:
    sys.addaudithook(refuse_network)


def connect_or_start(what: str) -> str:
    try:
        if what == "socket":
            socket.socket(socket.AF_INET)
        if what == "name":
            socket.getaddrinfo("localhost", 80)
        if what == "process":
            os.system("true")
        if what == "pair":
            socket.socketpair()[0].close()
    except PermissionError as error:
        return str(error)
    return "done"


def test_without_namespaces_a_hook_refuses_sockets() -> None:
    with ProcessPool(1, initializer=hooked, context=CleanContext()) as pool:
        said = {
            what: pool.schedule(connect_or_start, args=(what,)).result(30)
            for what in ("socket", "name", "process", "pair")
        }
    assert said == {
        "socket": "a sandboxed function has no network (socket.__new__)",
        "name": "a sandboxed function has no network (socket.getaddrinfo)",
        "process": "a sandboxed function has no network (os.system)",
        "pair": "done",
    }
