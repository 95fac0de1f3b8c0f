"""The trackers that `report` asks for."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.base.errors import ConfigError
from hflow.config.schema import ReportConfig
from hflow.dsl import missing_extra
from hflow.trackers.interface import Tracker
from hflow.trackers.registry import tracker_kind


def check_trackers(report: ReportConfig) -> None:
    """Check that the configured trackers exist, and that their libraries are installed.

    Raises:
        PlanError: for an unknown tracker.
        ConfigError: for the first without its libraries, and for one that has a key of its own.
    """
    for name in report.trackers:
        if hasattr(report, name):
            raise ConfigError(f"report.trackers.{name} has no effect. Set report.{name}.")
    for name, target in report.targets.items():
        kind = tracker_kind(name)
        unneeded = kind.unneeded(target)
        needed = (package for package in kind.packages if package not in unneeded)
        if problem := missing_extra(name, *needed):
            raise ConfigError(f"report.{name} is set, but {problem}")


def open_trackers(report: ReportConfig) -> Iterator[Tracker]:
    """Yield the configured trackers."""
    for name, target in report.targets.items():
        yield tracker_kind(name).open(target)
