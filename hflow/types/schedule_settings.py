"""The settings of a run's schedule, `schedule.*` in its configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from hflow.validation import CHECKED


def _int_if_whole(number: float) -> float:
    """Return whole numbers as int, so that reports say `max_staleness 2`."""
    return int(number) if number == int(number) else number


_Staleness = Annotated[StrictFloat, AfterValidator(_int_if_whole)]


@dataclass(frozen=True, config=CHECKED)
class ScheduleSettings:
    """How far generation may run ahead of training, and what happens to samples that become too old."""

    max_staleness: Annotated[StrictFloat, AfterValidator(_int_if_whole)] = Field(
        default=0, ge=0, le=1_000_000
    )
    """Weight syncs by which a trained token may lag (eta): 0 is synchronous, 2 to 8 is typical. With 0.5,
    generation may start half of the next sync's groups early."""
    sync_every: StrictInt = Field(default=1, ge=1)
    """Steps between two weight syncs of the generation engines (s)."""
    max_concurrent: StrictInt = Field(default=256, ge=1)
    """Maximum number of samples in flight, over all streams and engines."""
    interrupt: StrictBool = True
    """Whether a weight sync interrupts running samples, which keep their tokens and resume with the new
    weights (partial rollout). If false, engines finish running samples before they take new weights."""
    age_rule: StrictBool = True
    """Whether samples are dropped or aborted before they would train too old."""
    drop_older_than: StrictInt | None = Field(default=None, ge=0)
    """Limit of the age rule, in versions; null: the lag that the plan certifies, ceil((eta + 1) s) - 1."""
    queue: StrictInt | None = Field(default=None, ge=1)
    """Maximum number of accepted groups that wait for a batch; beyond it the oldest group is dropped.
    null: only admission limits them."""
    max_refused_per_step: StrictInt = Field(default=1000, ge=0)
    """Groups that may be refused since the last batch was formed; the run stops when there are more."""
