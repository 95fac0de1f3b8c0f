"""What a run does now, which the panel shows, and `hflow watch` reads from the run's directory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.files import read_json_object

GENERATING = "generating"
"""Phase in which engines generate."""
DEVICE, GENERATE, WEIGHTS = "device", "generate", "weights"
"""Lanes of the trace."""


@dataclass(frozen=True)
class OngoingWork:
    """Something that workers do now. Like `Span`, which it becomes when it has ended."""

    name: str
    """A node, or `generate REPLICA`."""
    lane: str
    workers: tuple[int, ...]
    start: float
    """Seconds since the epoch."""
    step: int
    """The training step, counted from 1; of what uses or makes a version of the weights, the step that
    begins with them."""


@dataclass(frozen=True)
class Activity:
    """What a run does at one moment. Times are in seconds since the epoch."""

    step_start: float | None = None
    """When the step before was complete, or the run began; None: workers are not ready."""
    awaited: tuple[str, float] | None = None
    """What is awaited while workers start, and since when."""
    work: tuple[OngoingWork, ...] = ()
    """What workers do, in the order in which it began."""
    samples: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Stream -> samples that are done and wanted, of a batch or an evaluation that is being generated."""
    seconds_per_step: float = 0.0
    """Average time of the last steps; 0 before the first."""
    warnings: tuple[str, ...] = ()
    """What the run was warned of."""

    @property
    def phase(self) -> tuple[str, float] | None:
        """What happens now, and since when: nodes that run, or what is awaited; None: nothing is known."""
        if self.awaited is not None:
            what, start = self.awaited
            return f"waiting for {what}", start
        nodes = [work for work in self.work if work.lane == DEVICE]
        is_generating = bool(self.samples) or not nodes
        others = [
            work for work in self.work if work.lane == WEIGHTS or (work.lane == GENERATE and is_generating)
        ]
        shown = [*nodes, *others]
        if not shown:
            return None
        names = [work.name if work.lane != GENERATE else GENERATING for work in shown]
        return ", ".join(dict.fromkeys(names)), shown[0].start

    def seconds_left(self, num_steps: int, now: float) -> float:
        """Return the estimated time until `num_steps` further steps are complete."""
        in_step = max(0.0, now - self.step_start) if self.step_start is not None else 0.0
        return max(num_steps * self.seconds_per_step - in_step, (num_steps - 1) * self.seconds_per_step, 0.0)


def write_activity(path: Path, activity: Activity) -> None:
    """Replace the file of an activity. It need not survive the loss of power."""
    new = path.with_name(f".{path.name}")
    new.write_text(json.dumps(asdict(activity)), encoding="utf-8")
    os.replace(new, path)


def read_activity(path: Path) -> Activity | None:
    """Return the activity in a file; None if there is no file.

    Raises:
        ConfigError: for a file that is damaged.
    """
    if not path.is_file():
        return None
    try:
        row: dict[str, Any] = read_json_object(path, "activity of a run")
        return Activity(
            step_start=row["step_start"],
            awaited=None if row["awaited"] is None else (str(row["awaited"][0]), float(row["awaited"][1])),
            work=tuple(OngoingWork(**{**work, "workers": tuple(work["workers"])}) for work in row["work"]),
            samples={name: (int(done), int(wanted)) for name, (done, wanted) in row["samples"].items()},
            seconds_per_step=float(row["seconds_per_step"]),
            warnings=tuple(map(str, row["warnings"])),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not the activity of a run: {error!r}; delete it") from error
