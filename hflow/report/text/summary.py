"""The summary that a run prints and stores when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hflow.report.formatting import format_missing


@dataclass(frozen=True)
class RunSummary:
    """The result of a run."""

    name: str
    directory: Path
    """The run's directory."""
    steps: int
    """Completed steps."""
    seconds: float
    """From when the workers are ready to the last step."""
    reason: str
    """Why it ended."""
    plan_digest: str
    samples: Mapping[str, int]
    """End -> number of samples."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Label -> last value of the metrics that the summary shows."""
    not_evaluated: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Side stream -> (refused samples, all samples) of its last evaluation, if it refused any."""
    warnings: tuple[str, ...] = ()
    """What was noted as a warning while it ran."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of `summary.json`; non-finite values are null."""
        values = {label: value if math.isfinite(value) else None for label, value in self.values.items()}
        return {**asdict(self), "directory": str(self.directory), "values": values}

    def render(self) -> RenderableType:
        """Render a headline, the values, and the directory of the results."""
        steps = f" after {self.steps} steps" if self.steps else ""
        head = Text(f"{self.name}: {self.reason}{steps}, {self.seconds:.1f} s", style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(no_wrap=True, overflow="ignore")
        for label, value in self.values.items():
            table.add_row(label, f"{value:.4g}")
        for stream, missing in self.not_evaluated.items():
            table.add_row(stream, format_missing(*missing))
        if self.samples:
            table.add_row("samples", _counted(self.samples))
        table.add_row("results", Text(str(self.directory)))
        return Group(head, table)


def _counted(samples: Mapping[str, int]) -> str:
    """Describe the ends of the samples: trained first, then by number."""
    ends = sorted(samples.items(), key=lambda end: (end[0] != "trained", -end[1]))
    return ", ".join(f"{num:,} {end}" for end, num in ends)
