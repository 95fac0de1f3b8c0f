"""What is left to say when a run has ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class RunSummary:
    """The result of a run."""

    name: str
    directory: Path
    """The run's directory."""
    steps: int
    """Steps done."""
    seconds: float
    """From the workers' being ready to the last step."""
    reason: str
    """Why it ended."""
    plan_digest: str
    samples: Mapping[str, int]
    """How many samples had each end."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Last values of the metrics worth a line, by label."""

    def to_json(self) -> dict[str, Any]:
        """The content of `summary.json`; values that are not finite are null."""
        values = {label: value if math.isfinite(value) else None for label, value in self.values.items()}
        return {**asdict(self), "directory": str(self.directory), "values": values}

    def render(self) -> RenderableType:
        """A headline, the values, and where everything lies."""
        head = Text(
            f"{self.name}: {self.reason} after {self.steps} steps, {self.seconds:.1f} s", style="bold"
        )
        table = Table.grid(padding=(0, 2))
        table.add_column()
        table.add_column(no_wrap=True, overflow="ignore")
        for label, value in self.values.items():
            table.add_row(label, f"{value:.4g}")
        if self.samples:
            table.add_row("samples", _counted(self.samples))
        table.add_row("results", Text(str(self.directory)))
        return Group(head, table)


def _counted(samples: Mapping[str, int]) -> str:
    """What became of the samples: the trained first, then by number."""
    ends = sorted(samples.items(), key=lambda end: (end[0] != "trained", -end[1]))
    return ", ".join(f"{num:,} {end}" for end, num in ends)
