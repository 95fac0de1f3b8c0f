"""The settings of a run's schedule, `schedule.*` in its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _minimum(minimum: float, default: Any) -> Any:
    return field(default=default, metadata={"minimum": minimum})


@dataclass(frozen=True)
class ScheduleSettings:
    """How far generation may run ahead of training, and what happens to samples that become too old.

    The metadata `minimum` of a field is the smallest value that it may have.
    """

    max_staleness: float = _minimum(0, 0)
    """Weight syncs by which a trained token may lag (eta): 0 is synchronous, 2 to 8 is typical. With 0.5,
    generation may start half of the next sync's groups early."""
    sync_every: int = _minimum(1, 1)
    """Steps between two weight syncs of the generation engines (s)."""
    max_concurrent: int = _minimum(1, 256)
    """Maximum number of samples in flight, over all streams and engines."""
    interrupt: bool = True
    """Whether a weight sync interrupts running samples, which keep their tokens and resume with the new
    weights (partial rollout). If false, engines finish running samples before they take new weights."""
    age_rule: bool = True
    """Whether samples are dropped or aborted before they would train too old."""
    drop_older_than: int | None = _minimum(0, None)
    """Limit of the age rule, in versions; null: the lag that the plan certifies, ceil((eta + 1) s) - 1."""
    queue: int | None = _minimum(1, None)
    """Maximum number of accepted groups that wait for a batch; beyond it the oldest group is dropped.
    null: only admission limits them."""
    max_refused_per_step: int = _minimum(0, 1000)
    """Groups that may be refused since the last batch was formed; the run stops when there are more."""
