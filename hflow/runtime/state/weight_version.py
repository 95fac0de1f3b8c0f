"""The weights that one generation engine holds, and those that it receives next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class WeightCopy:
    """The versions of one engine's weights; -1 before the first."""

    version: int = -1
    """What it generates with, or would if it were awake."""
    target: int = -1
    """What it was given last: `version` itself, or newer weights that it has not loaded yet."""
