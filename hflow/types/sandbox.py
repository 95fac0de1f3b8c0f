"""`Sandbox`: the limits of a tool, stored on the function by `@sandbox` so that any process can read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "__hflow_sandbox__"


@dataclass(frozen=True)
class Sandbox:
    """Limits of the process in which a tool runs. The process has no network access."""

    timeout: float
    """Seconds that one call may take."""
    memory_mb: int
    """Address space in MiB that a call may use beyond what the process has when the function is loaded."""


def sandbox_of(function: Callable[..., Any]) -> Sandbox | None:
    """Return the limits of a function with a sandbox; None for any other."""
    return getattr(function, ATTRIBUTE, None)
