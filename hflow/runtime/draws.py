"""Seconds of what is simulated: a fixed number, or drawn for each sample from a distribution of lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from hflow.plan.workload import Workload, quantile

Draw = Callable[[int], float]
"""Sample, group or step -> seconds. The same for the same key, so that a run is decided by its seed."""
Durations = Mapping[str, float | Draw]


def seconds_of(durations: Durations, name: str, key: int) -> float:
    """Seconds of a node or source for one sample, group or step; 0 where it is not named."""
    given = durations.get(name, 0.0)
    return given(key) if callable(given) else given


def response_seconds(workload: Workload, seconds_per_token: float, seed: int) -> Draw:
    """Seconds of generating one response whose length follows the workload's distribution."""

    def draw(sample: int) -> float:
        share = Random(f"response/{seed}/{sample}").random()
        return quantile(workload, min(max(share, 1e-9), 1 - 1e-9)) * seconds_per_token

    return draw
