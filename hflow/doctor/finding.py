"""`Finding`: the result of one check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    topic: str
    """`version`, `device`, `backend`, `engine`, `optional`, `ray`, `gpu`, `host`, `kernel`, `collective` or
    `trial`."""
    name: str
    ok: bool
    detail: str
    fix: str = ""
    """If not ok: a command, or what the user should know."""
    required: bool = True
    """Whether hflow cannot run without it."""
