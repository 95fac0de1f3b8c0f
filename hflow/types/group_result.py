"""`GroupResult`: what a sampler of rows learns about a group that has ended."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLER_PARAMETERS = ("state", "finished", "position", "order")
"""The first parameters of a function with `@sampler`."""


@dataclass(frozen=True)
class GroupResult:
    """A group whose batch was formed, or that was refused."""

    row: int
    """The dataset row of the group."""
    rewards: tuple[float, ...]
    """The reward of each of its samples. Empty if no node rewards them, or the group was refused before all
    of its samples had a reward."""
    is_refused: bool = False
    """Whether it left the run without being trained."""

    @property
    def mean(self) -> float | None:
        """The mean reward: the pass rate, where a reward is 0 or 1. None without rewards."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def spread(self) -> float | None:
        """The range of the rewards; 0: all advantages are 0. None without rewards."""
        return max(self.rewards) - min(self.rewards) if self.rewards else None
