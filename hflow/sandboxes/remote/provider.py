"""`RemoteSandboxes`: what providers share whose calls run where there is no hflow.

A subclass starts a container or a machine for each call, runs a program there, and ends it. The program holds
the limits of time, memory, network and processes itself, as the provider `process` does, wherever it runs.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import inspect
import json
import math
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from cloudpickle import cloudpickle

from hflow.base.errors import EpisodeError, HflowError, RunError, reason_of
from hflow.processes.pickling import pickle_with_bodies
from hflow.sandboxes import confinement, inside
from hflow.sandboxes.calls import (
    LONGEST_REPLY,
    LONGEST_STRETCH,
    START_SECONDS,
    CallPlaces,
    name_of,
    parse_reply,
    result_of,
)
from hflow.sandboxes.remote import bootstrap
from hflow.types.sandbox import Sandbox, Tool, ToolFailed

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The version that the Python of an image must have, as compiled functions depend on it."""
PROGRAM_PATH = str(PurePosixPath("/tmp", "hflow-call.py"))
"""The file of the program on a machine of a service."""


class RemoteSandboxes:
    """Calls in a container or machine of their own each, at most `num_calls` of a tool at the same time."""

    name = ""
    """The provider's name, for messages."""
    watches_input = False
    """Whether standard input stays open as long as the call is wanted."""

    def __init__(self, num_calls: int) -> None:
        self._places = CallPlaces(num_calls)

    async def run(self, tool: Tool, limits: Sandbox, arguments: Mapping[str, Any]) -> Any:
        """Call a tool, as `SandboxProvider.run`. Cancelling the awaiting task ends its container."""
        program = make_program(tool, limits, arguments, self.watches_input)
        async with self._places.of(tool, limits):
            try:
                async with asyncio.timeout(longest_life(limits)):
                    output = await self.execute(program, limits)
            except (ToolFailed, HflowError):
                raise
            except Exception as error:
                raise self._lost(tool, reason_of(error)) from error
        _, mark, line = output.rpartition(bootstrap.MARK)
        if not mark:
            said = output.decode(errors="replace").strip() or "nothing"
            raise self._lost(tool, f"it wrote no reply, but {said[-200:]!r}")
        kind, value = parse_reply(line.strip())
        if kind in ("lost", "refused"):
            raise self._lost(tool, str(value))
        return result_of(tool, kind, value)

    async def execute(self, program: bytes, limits: Sandbox) -> bytes:
        """Run a program of Python in a new container or machine, and return its standard output.

        Raises:
            Exception: when that fails; the message says why.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: what runs ends with its calls."""

    def _lost(self, tool: Tool, reason: str) -> EpisodeError:
        return EpisodeError(f"the sandbox of {name_of(tool)} ({self.name}) failed: {reason}")


def longest_life(limits: Sandbox) -> int:
    """Return the longest life of a call's container or machine, in seconds."""
    return math.ceil(START_SECONDS + LONGEST_STRETCH * limits.timeout)


class ServiceSandboxes(RemoteSandboxes):
    """Calls on machines of a service, by its own package, which has the provider's name."""

    key_variables: tuple[str, ...] = ()
    """The environment variables with the service's key."""

    @classmethod
    def find_problem(cls, limits: Sandbox) -> str | None:
        """Return the reason why calls with these limits cannot use the service; None if they may."""
        name = cls.name
        if importlib.util.find_spec(name) is None:
            return f"provider={name!r} needs the package {name}. Run pip install 'hflow-rl[{name}]'"
        if missing := [variable for variable in cls.key_variables if not os.environ.get(variable)]:
            return f"provider={name!r} needs a key in the environment variable {missing[0]}. Set it"
        return refuse_local(name, limits)


def refuse_local(name: str, limits: Sandbox) -> str | None:
    """Return the reason why limits about files of this machine cannot hold elsewhere; None if they can."""
    if limits.readable:
        return f"provider={name!r} has no files of this machine. Remove readable=, and put them in the image"
    if limits.without_landlock:
        return f"without_landlock concerns provider='process' only. Remove it, or provider={name!r}"
    return None


def make_program(tool: Tool, limits: Sandbox, arguments: Mapping[str, Any], watches_input: bool) -> bytes:
    """Return the program of a call.

    Raises:
        RunError: when the tool cannot be pickled.
        TypeError: when an argument is not JSON.
    """
    sources = {
        "cloudpickle": "",
        "cloudpickle.cloudpickle": inspect.getsource(cloudpickle),
        "hflow_inside": inspect.getsource(inside),
        "hflow_confinement": inspect.getsource(confinement),
    }
    if not inspect.isfunction(tool):
        raise RunError(f"{name_of(tool)} is no function, so it cannot run in a sandbox elsewhere")
    setup = {
        "python": PYTHON,
        "modules": {name: _pack(source.encode()) for name, source in sources.items()},
        "tool": _pack(pickle_with_bodies(tool, [tool], by_value=True)),
        "arguments": dict(arguments),
        "timeout": limits.timeout,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "longest_stretch": LONGEST_STRETCH,
        "longest_reply": LONGEST_REPLY,
        "watches_input": watches_input,
    }
    return f"{inspect.getsource(bootstrap)}\n\nmain(json.loads({json.dumps(setup)!r}))\n".encode()


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()
