"""The directory of one run, and where each of its files lies.

OUT/NAME/20260131-142500/     OUT/NAME/latest -> 20260131-142500
    config.yaml  plan.json  metrics.jsonl  trace.json  ledger.sqlite  summary.json
    tensorboard/  weights/ (while it runs: those on their way by disk)
    checkpoints/step-280/MODEL/    checkpoints/latest -> step-280
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.errors import ConfigError
from hflow.runtime.execution.checkpoint import point


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's directory `path`."""

    path: Path

    @classmethod
    def create(cls, out: str | Path, name: str) -> RunDirectory:
        """Make a new directory for a run that starts now, and point `latest` at it.

        Raises:
            ConfigError: when no directory can be made there.
        """
        if Path(name).name != name:
            raise ConfigError(f"name is {name!r}; a run's name is that of one directory, so it has no '/'")
        parent = Path(out) / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path = _make_fresh(parent / time.strftime("%Y%m%d-%H%M%S"))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"out is {str(out)!r}, where no directory can be made: {reason}") from error
        run = cls(path)
        run.tensorboard.mkdir()
        run.checkpoints.mkdir()
        point(parent / "latest", path.name)
        return run

    @property
    def weights(self) -> Path:
        """Where weights lie that go to engines by disk, each until it is loaded."""
        return self.path / "weights"

    @property
    def config(self) -> Path:
        """The composed configuration."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """The plan file: recipe, configuration and plan, as `hflow run --plan` reads it."""
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Directory of TensorBoard events."""
        return self.path / "tensorboard"

    @property
    def trace(self) -> Path:
        """What every worker did when."""
        return self.path / "trace.json"

    @property
    def ledger(self) -> Path:
        """What became of every sample."""
        return self.path / "ledger.sqlite"

    @property
    def summary(self) -> Path:
        """The result, written when the run ends."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write `summary.json`."""
        self.summary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _make_fresh(path: Path) -> Path:
    """Make `path`, or `path-2`, `path-3` ... where runs started in the same second."""
    candidate, number = path, 1
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
