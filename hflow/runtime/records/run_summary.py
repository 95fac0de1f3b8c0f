"""`RunSummary`: the result of a run, which `hflow.run` returns and `summary.json` stores."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import ConfigError
from hflow.runtime.ledger.query import select
from hflow.runtime.ledger.schema import COLUMNS
from hflow.runtime.saving.run_directory import RunDirectory, read_metrics

if TYPE_CHECKING:
    from pandas import DataFrame


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
    sample_ends: Mapping[str, int]
    """End -> number of samples."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Label -> last value of the metrics that the summary shows."""
    not_evaluated: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Side stream -> (refused samples, all samples) of its last evaluation, if it refused any."""
    warnings: tuple[str, ...] = ()
    """What was noted as a warning while it ran."""

    def metrics(self) -> DataFrame:
        """Return the metrics as a pandas data frame: a row for each step, a column for each metric.

        Raises:
            ConfigError: if pandas is not installed, or the run has no metrics.
        """
        pandas = _import_pandas()
        steps: dict[int, dict[str, float]] = {}
        path = RunDirectory(self.directory).metrics
        for row in read_metrics(path) if path.is_file() else ():
            values = {name: value for name, value in row.items() if name != "step" and value is not None}
            steps.setdefault(int(row["step"] or 0), {}).update(values)
        return pandas.DataFrame.from_dict(steps, orient="index").rename_axis("step").sort_index()

    def samples(self, where: str | None = None) -> DataFrame:
        """Return the samples as a pandas data frame, with the columns that `hflow samples` has.

        Args:
            where: SQL condition on these columns, such as `"reward < 0.5"`; None: all samples.

        Raises:
            ConfigError: if pandas is not installed, or the SQL is invalid.
        """
        pandas = _import_pandas()
        return pandas.DataFrame(select(RunDirectory(self.directory).ledger, where).rows, columns=[*COLUMNS])

    def to_json(self) -> dict[str, Any]:
        """Return the content of `summary.json`; non-finite values are null."""
        values = {label: value if math.isfinite(value) else None for label, value in self.values.items()}
        row = asdict(self)
        return {"samples": row.pop("sample_ends"), **row, "directory": str(self.directory), "values": values}


def _import_pandas() -> Any:
    try:
        return importlib.import_module("pandas")
    except ImportError:
        raise ConfigError("data frames need pandas: pip install pandas") from None
