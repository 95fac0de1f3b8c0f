"""`read_run`: what a run has written so far: configuration, metrics, summary, and whether it still runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hflow.backends.interface import LOSS
from hflow.errors import ConfigError
from hflow.json_text import read_json_object
from hflow.launch.find_run import find_run
from hflow.runtime.execution.run_directory import RunDirectory, read_metrics
from hflow.user_files import resolved

Curve = tuple[tuple[int, float], ...]
"""(completed steps, value), ascending."""


@dataclass(frozen=True)
class RunRecord:
    """A run as its files describe it."""

    directory: RunDirectory
    config: Mapping[str, Any]
    """The whole configuration as plain values."""
    plan: Mapping[str, Any]
    """The rows of its plan, which may be those of an earlier version of hflow."""
    curves: Mapping[str, Curve]
    """Metric -> its values. Where a step was done twice, the later value counts."""
    summary: Mapping[str, Any] | None
    """Content of `summary.json`; None: the run has not ended, or failed."""
    is_running: bool
    error: str | None = None
    """What it failed with; None: it did not, or was killed."""

    @property
    def name(self) -> str:
        """NAME/TIME."""
        path = resolved(self.directory.path)
        return f"{path.parent.name}/{path.name}"

    @property
    def results(self) -> tuple[str, ...]:
        """The metrics that tell how well it learned: numbers that nodes give samples, then losses."""
        nodes = self.plan["graph"]["nodes"]
        fields = [
            f"{node['stream']}/{returned['field']}"
            for node in nodes
            if node["spec"]["verb"] != "train"
            for returned in node["spec"]["returns"]
        ]
        losses = [LOSS.member(node["spec"]["name"]) for node in nodes if node["spec"]["verb"] == "train"]
        return tuple(name for name in dict.fromkeys((*fields, *losses)) if name in self.curves)

    @property
    def steps(self) -> int:
        """Completed steps."""
        return max((curve[-1][0] for curve in self.curves.values()), default=0)

    @property
    def state(self) -> str:
        """How the run ended, or that it is still going."""
        planned = self.config.get("steps")
        if self.is_running:
            return f"still going, {self.steps} of {planned} steps"
        if self.error is not None:
            return f"failed after {self.steps} of {planned} steps: {self.error}"
        if self.summary is None:
            return f"failed or killed after {self.steps} of {planned} steps"
        return f"{self.summary.get('reason')} after {self.summary.get('steps')} steps"


def read_run(run: str) -> RunRecord:
    """Return what a run has written.

    Args:
        run: a run's directory, or NAME for the latest run in `runs/NAME`.

    Raises:
        ConfigError: if there is no such run, it has no metrics yet, or a file is damaged.
    """
    directory = find_run(run, "plan.json")
    file = read_json_object(directory.plan, "plan of a run")
    if not _is_plan(file):
        raise ConfigError(f"{directory.plan} is not the plan of a run, or damaged; name another run")
    is_running = directory.is_running
    has_failed = directory.error.is_file() and not is_running
    error = directory.error.read_text("utf-8", "replace").strip() if has_failed else None
    curves: dict[str, dict[int, float]] = {}
    for row in read_metrics(directory.metrics) if directory.metrics.is_file() else []:
        for name, value in row.items():
            if name != "step" and value is not None:
                curves.setdefault(name, {})[int(row["step"] or 0)] = value
    if not curves:
        ended = f"it failed: {error}" if error else "it ended before its first step"
        when = "wait for its first step" if is_running else f"{ended}; name another run"
        raise ConfigError(f"the run in {directory.path} has no metrics yet; {when}")
    has_ended = directory.summary.is_file() and not is_running and not has_failed
    return RunRecord(
        directory=directory,
        config=file["config"],
        plan=file["plan"],
        curves={name: tuple(sorted(values.items())) for name, values in sorted(curves.items())},
        summary=read_json_object(directory.summary, "summary of a run") if has_ended else None,
        is_running=is_running,
        error=error,
    )


def _is_plan(file: Mapping[str, Any]) -> bool:
    """Return whether a plan file has the parts that are read here, whatever version of hflow wrote it."""
    try:
        nodes = file["plan"]["graph"]["nodes"]
        texts = [node["spec"][key] for node in nodes for key in ("name", "verb")]
        texts += [node["stream"] for node in nodes]
        texts += [returned["field"] for node in nodes for returned in node["spec"]["returns"]]
        return isinstance(file["config"]["steps"], int) and all(isinstance(text, str) for text in texts)
    except (AttributeError, LookupError, TypeError):
        return False
