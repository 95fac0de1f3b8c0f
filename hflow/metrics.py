"""Declarations of the metrics that hflow computes.

A metric is declared once, in the module that computes it. Everything else that needs to know about
metrics reads the declarations: the live panel, the TensorBoard log, the check of `report.show` and the
table in `docs/metrics.md`. Metrics that recipes return (`NODE/name`, `STREAM/field`) need no declaration.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

PanelValue = Literal["last", "sum", "mean", "max", "now"]
"""What the live panel shows of a metric: the last step's value, the sum since the run's start, the mean or
the maximum of the last steps, or the value at this moment, while a step is under way."""


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of metrics whose names differ in one part."""

    name: str
    """The name in `metrics.jsonl`. A family has a placeholder in it: `refused/{reason}`."""
    unit: str
    """Such as `s` or `samples`. A `share` is between 0 and 1."""
    help: str
    """What it means, in one line."""
    live: PanelValue | None = None
    """What the live panel shows of it by default; None: nothing."""
    is_histogram: bool = False
    """Whether the members of a family are the bins of one histogram, named by whole numbers."""

    def member(self, key: object) -> str:
        """Return the name of a family's member, such as `refused/keep` for the key `keep`."""
        return _PLACEHOLDER.sub(str(key), self.name)

    def key_of(self, name: str) -> str | None:
        """Return the part of a name that stands for the placeholder.

        The result is "" for a metric that is no family, and None where the name is another metric's.
        """
        if not name.startswith(self._prefix):
            return None
        match = self._pattern.fullmatch(name)
        return "".join(match.groups()) if match else None

    @property
    def suffix(self) -> str:
        """The part of the name after the last slash."""
        return self.name.rpartition("/")[2]

    @cached_property
    def _prefix(self) -> str:
        return self.name.partition("{")[0]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        key = r"(\d+)" if self.is_histogram else r"([^/]+)"
        return re.compile(key.join(map(re.escape, _PLACEHOLDER.split(self.name))))


_PLACEHOLDER = re.compile(r"\{\w+\}")
_declared: dict[str, Metric] = {}


def declare(
    name: str, unit: str, help: str, *, live: PanelValue | None = None, is_histogram: bool = False
) -> Metric:
    """Declare a metric that hflow computes. The arguments are the attributes of `Metric`."""
    assert name not in _declared, f"metric {name} is declared twice"
    metric = _declared[name] = Metric(name, unit, help, live, is_histogram)
    return metric


def declared() -> tuple[Metric, ...]:
    """Return the metrics that the modules imported so far have declared, sorted by name."""
    return tuple(_declared[name] for name in sorted(_declared))


def find_metric(name: str, metrics: Iterable[Metric]) -> Metric | None:
    """Return the declaration of a metric; None where a recipe made it."""
    return next((metric for metric in metrics if metric.key_of(name) is not None), None)
