"""What `@sandbox` says about a function, readable wherever the function travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "__hflow_sandbox__"


@dataclass(frozen=True)
class Sandbox:
    """Limits of the process in which a function runs; it has no network."""

    timeout: float
    """Seconds a call."""
    memory_mb: int
    """Address space beyond what the process has once the function is loaded."""


def sandbox_of(function: Callable[..., Any]) -> Sandbox | None:
    """The limits of a sandboxed function; None for any other."""
    return getattr(function, ATTRIBUTE, None)
