"""`hflow compare`: how runs were configured differently, and what their metrics reached.

Runs that differ only in their seed are one side of the comparison: their values are given as mean and
standard deviation.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from hflow.base.errors import ConfigError, nearest
from hflow.base.files import resolved
from hflow.config import flatten
from hflow.launch.results.runs import RunRecord, read_run
from hflow.report.formatting import MAX_POINTS, Points, ends_of, thinned
from hflow.runtime.records import step_metrics
from hflow.training.interface import LOSS

SAME_SIDE = ("seed", "name", "out")
"""Keys of the configuration that may differ between the runs of one side."""
ALWAYS = (step_metrics.SAMPLES_PER_SECOND.name, step_metrics.STALENESS_MEAN.name)
"""Metrics of the run itself that are compared by default."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of a number over the runs of a side."""

    mean: float
    deviation: float | None
    """None: there is one run."""


@dataclass(frozen=True)
class Side:
    """Runs with the same configuration, except for their seed."""

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    states: tuple[str, ...]


@dataclass(frozen=True)
class ReachedValues:
    """What a metric reached on one side."""

    final: Spread
    """The mean of the last tenth of the values."""
    best: Spread
    """The highest value; the lowest of a loss."""
    best_step: int
    """Completed steps at which the first run has its best value."""
    curve: tuple[tuple[int, float], ...]
    """(completed steps, mean of the runs), thinned."""


@dataclass(frozen=True)
class ComparedMetric:
    """One metric of all sides."""

    name: str
    values: tuple[ReachedValues | None, ...]
    """By side; None: it does not have the metric."""


@dataclass(frozen=True)
class Comparison:
    """The result of `hflow compare`."""

    sides: tuple[Side, ...]
    config: tuple[tuple[str, tuple[str, ...]], ...]
    """(key, value of each side) where the sides differ; an empty text: null, or the key is not there."""
    metrics: tuple[ComparedMetric, ...]
    is_deterministic: bool
    """Whether all runs had `deterministic=true`; otherwise even runs of one seed may differ."""

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return asdict(self)


def compare(runs: Sequence[str], patterns: Sequence[str] = ()) -> Comparison:
    """Compare runs.

    Args:
        runs: directories of runs, or NAME for the latest run in `runs/NAME`.
        patterns: names or globs of metrics; empty: numbers that nodes give samples, losses, and `ALWAYS`.

    Raises:
        ConfigError: for fewer than two runs, a run that cannot be read, or a pattern that fits no metric.
    """
    if len(runs) < 2:
        raise ConfigError("compare needs two runs or more, as in `hflow compare grpo ppo`")
    records = [read_run(run) for run in runs]
    paths = [resolved(record.directory.path) for record in records]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise ConfigError(f"{twice} is named twice; name each run once")
    sides = _sides(records)
    names = _chosen(records, patterns)
    return Comparison(
        sides=tuple(_describe(side, records) for side in sides),
        config=tuple(_config_differences(sides)),
        metrics=tuple(
            ComparedMetric(name, tuple(_reached(name, _curves(name, side)) for side in sides))
            for name in names
        ),
        is_deterministic=all(record.config.get("deterministic") is True for record in records),
    )


def _sides(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Group runs that have the same configuration, except for `SAME_SIDE`."""
    sides: dict[str, list[RunRecord]] = {}
    for record in records:
        rest = {key: value for key, value in record.config.items() if key not in SAME_SIDE}
        sides.setdefault(json.dumps(rest, sort_keys=True, default=str), []).append(record)
    return list(sides.values())


def _describe(side: Sequence[RunRecord], records: Sequence[RunRecord]) -> Side:
    """Name a side by its runs' name if no other side has it, else by its first run."""
    name = str(side[0].config.get("name"))
    others = [record for record in records if record not in side]
    is_unique = all(record.config.get("name") != name for record in others)
    return Side(
        name=name if is_unique else side[0].name,
        runs=tuple(str(record.directory.path) for record in side),
        seeds=tuple(int(record.config.get("seed", 0)) for record in side),
        states=tuple(record.state for record in side),
    )


def _config_differences(sides: Sequence[Sequence[RunRecord]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    configs = [dict(flatten(side[0].config)) for side in sides]
    for key in sorted({key for config in configs for key in config}):
        values = [config.get(key) for config in configs]
        if key not in SAME_SIDE and any(value != values[0] for value in values):
            yield key, tuple("" if value is None else _text(value) for value in values)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _chosen(records: Sequence[RunRecord], patterns: Sequence[str]) -> list[str]:
    """Return the metrics to compare, in the order of the patterns."""
    names = list(dict.fromkeys(name for record in records for name in record.curves))
    if not patterns:
        results = dict.fromkeys(name for record in records for name in record.results)
        return [*results, *(name for name in ALWAYS if name in names)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"--metric: none of the runs has {pattern!r}{nearest(pattern, names)}")
    return list(dict.fromkeys(name for p in patterns for name in names if fnmatchcase(name, p)))


def _curves(name: str, side: Sequence[RunRecord]) -> list[Points]:
    return [record.curves[name] for record in side if name in record.curves]


def _reached(name: str, curves: Sequence[Points]) -> ReachedValues | None:
    if not curves:
        return None
    choose = min if LOSS.key_of(name) is not None else max
    best = [choose(curve, key=lambda point: point[1]) for curve in curves]
    return ReachedValues(
        final=_spread([ends_of(curve)[1] for curve in curves]),
        best=_spread([value for _, value in best]),
        best_step=best[0][0],
        curve=thinned(mean_curve(curves), MAX_POINTS),
    )


def mean_curve(curves: Sequence[Points]) -> tuple[tuple[int, float], ...]:
    """Return the mean of several curves at the steps that all of them have."""
    values = [dict(curve) for curve in curves]
    steps = sorted(set(values[0]).intersection(*values))
    return tuple((step, statistics.fmean(at[step] for at in values)) for step in steps)


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)
