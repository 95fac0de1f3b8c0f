"""`BodyLine`: a line that a body printed or logged, on its way from a worker to the run's directory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BodyLine:
    """A line that a body printed or logged, or a line of its traceback."""

    node: str
    key: int
    """The sample or group that the body is called for; of a batch node, the step."""
    time: float
    """Seconds since the epoch."""
    text: str
    is_traceback: bool = False
