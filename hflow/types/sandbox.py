"""`Sandbox`: the limits of a tool, stored on the function by `@sandbox` so that any process can read them.

The function has them as a dict, so that a pickled tool needs nothing of hflow.

To add a provider, which runs tools in another way, write `provider.py` in `sandboxes/NAME`, and add one line
to `SANDBOX_PROVIDERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hflow.base.errors import nearest
from hflow.base.registry import Registry

Tool = Callable[..., Any]

SANDBOX_PROVIDERS = Registry(
    "sandbox provider",
    "hflow.sandboxes",
    {
        "process": "hflow.sandboxes.process.provider:ProcessSandboxes",
        "docker": "hflow.sandboxes.remote.docker:DockerSandboxes",
        "e2b": "hflow.sandboxes.remote.e2b:E2BSandboxes",
        "daytona": "hflow.sandboxes.remote.daytona:DaytonaSandboxes",
        "modal": "hflow.sandboxes.remote.modal:ModalSandboxes",
    },
)
"""The providers, each with what builds it: the most calls of a tool that run at the same time -> a new
`SandboxProvider` (`sandboxes/providers.py`)."""

ATTRIBUTE = "__hflow_sandbox__"
LIMITS_OF_KNOBS = "__hflow_sandbox_of_knobs__"
"""Attribute of a body that runs programs within limits of its own: a function of its knobs -> `Sandbox`."""


@dataclass(frozen=True)
class Sandbox:
    """Limits of a call, which has no network and no environment variables."""

    timeout: float
    """Seconds that one call may take, without those in which it waits for a processor."""
    memory_mb: int
    """Address space in MiB that a process of the call may use beyond what it has when it starts. A file may
    have the same size."""
    processes: bool = False
    """Whether a call may start processes. They end with it."""
    readable: tuple[str, ...] = ()
    """Absolute paths that a call may read, besides Python, installed packages and system libraries."""
    without_landlock: bool = False
    """Whether a call may run where the kernel cannot protect files."""
    provider: str = SANDBOX_PROVIDERS.default
    """What runs the calls and holds these limits."""
    image: str = ""
    """The image of the container or machine of a call; empty: the provider's default. `process` has none."""


class ToolFailed(Exception):
    """A tool failed, and the model is to read the message."""


def provider_problem(name: str) -> str | None:
    """Return the reason why there is no provider of this name; None if there is one."""
    if name in SANDBOX_PROVIDERS:
        return None
    known = ", ".join(SANDBOX_PROVIDERS)
    return f"there is no provider {name!r}{nearest(name, SANDBOX_PROVIDERS)} (known: {known})"


def sandbox_of(function: Tool) -> Sandbox | None:
    """Return the limits of a function with a sandbox; None for any other."""
    limits = getattr(function, ATTRIBUTE, None)
    return None if limits is None else Sandbox(**limits)
