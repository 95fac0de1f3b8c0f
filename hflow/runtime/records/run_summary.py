"""`RunSummary`: the result of a run, which `hflow.run` returns and `summary.json` stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
