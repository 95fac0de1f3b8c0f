"""The versions of the weights that one generation engine holds and loads next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class EngineWeights:
    """Versions of one engine's weights; -1 before the first. Invariant: `version` <= `target`."""

    version: int = -1
    """Version that it generates with, or would generate with if it were awake."""
    target: int = -1
    """Version that it was given last: `version`, or newer weights that it has not loaded yet."""

    def lose(self) -> None:
        """Forget the weights of an engine that has failed, and those that it was given."""
        self.version = self.target = -1
