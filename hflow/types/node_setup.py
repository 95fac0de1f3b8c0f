"""The setup of a node, stored on what a worker calls for it, so that any process can find and run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ATTRIBUTE = "__hflow_setup__"


def setup_of(body: Callable[..., Any]) -> Callable[[], None] | None:
    """Return the setup of a process for calls of a body; None if its node type has no `setup`."""
    return getattr(body, ATTRIBUTE, None)
