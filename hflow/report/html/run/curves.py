"""Curves of metrics as SVG paths, in groups that belong together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from hflow.base.text import format_number
from hflow.report.formatting import MAX_POINTS, Points, ends_of, thinned

WIDTH, HEIGHT, MARGIN = 360, 110, 6
"""Size of a plot, and the space above and below its curve, in the units of its view box."""
MAX_DOTS = 30
"""Points of a curve that are also drawn one by one."""

MAX_STALENESS = "staleness/max"
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Policy", ("kl", "entropy", "ref_kl", "clip_fraction", "engine_kl", "behav_kl", "grad_norm", "lr")),
    ("Staleness", ("staleness/mean", MAX_STALENESS, "staleness/in_flight", "staleness/in_queue")),
    (
        "Speed",
        (
            "time/step_seconds",
            "time/samples_per_second",
            "time/tokens_per_second",
            "time/tokens_per_second_per_device",
            "time/generated_tokens_per_second",
            "mfu",
            "busy/engines",
            "busy/trainers",
        ),
    ),
    ("Seconds of nodes", ("seconds/*",)),
    ("Memory", ("memory/*", "memory_planned/*")),
)
"""(title, metrics), by their name, which may be a glob, or by its part after the slash, where that belongs to
a train node."""


@dataclass(frozen=True)
class Series:
    """The values of a metric that one curve shows."""

    points: Points
    final: str
    """The value that it reached, as text."""
    label: str = ""
    """What it belongs to; empty if a plot has one curve."""
    colour: int = 1


@dataclass(frozen=True)
class CurveLine:
    """One curve of a plot."""

    label: str
    colour: int
    final: str
    path: str
    dots: tuple[tuple[float, float], ...]
    """Points of a curve that has few of them."""
    points: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CurveView:
    """The plot of one metric."""

    name: str
    unit: str
    help: str
    low: str
    high: str
    first_step: str
    last_step: str
    lines: tuple[CurveLine, ...]


def curve_groups(
    curves: Mapping[str, Points],
    results: Sequence[str],
    train_nodes: Sequence[str],
    units: Mapping[str, tuple[str, str]],
) -> tuple[tuple[tuple[str, tuple[CurveView, ...]], ...], tuple[CurveView, ...]]:
    """Return the curves that are shown at once, in groups with titles, and all others.

    The number beside a curve is its final value, the mean of its last tenth. Staleness that is 0 throughout,
    as in a synchronous run, has no curve. `results` is what the run learned, shown first; the metrics of
    `train_nodes` tell how the policy changes; `units` has (unit, meaning) of metrics that hflow computes.
    """
    curves = with_staleness(curves)
    named = [("Results", tuple(results))]
    for title, names in GROUPS:
        members = [
            name if "/" in name else f"{node}/{name}"
            for name in names
            for node in (("",) if "/" in name else train_nodes)
        ]
        found = [name for member in members for name in curves if fnmatchcase(name, member)]
        named.append((title, tuple(dict.fromkeys(found))))
    most = max((points[-1][0] for points in curves.values()), default=1)
    views = {}
    for name, points in curves.items():
        series = Series(points, format_number(ends_of(points)[1]))
        views[name] = curve_view(name, [series], most, *units.get(name, ("", "")))
    groups = [(title, tuple(views[name] for name in names if name in views)) for title, names in named]
    shown = {curve.name for _, members in groups for curve in members}
    others = tuple(view for name, view in views.items() if name not in shown)
    return tuple(group for group in groups if group[1]), others


def with_staleness(curves: Mapping[str, Points]) -> Mapping[str, Points]:
    """Return curves without those of staleness if it was 0 in every step."""
    has_staleness = any(value for _, value in curves.get(MAX_STALENESS, ()))
    return curves if has_staleness else {n: c for n, c in curves.items() if not n.startswith("staleness/")}


def curve_view(
    name: str, series: Sequence[Series], most: int, unit: str = "", meaning: str = ""
) -> CurveView:
    """Return the plot of a metric from step 0 to step `most`, with one curve for each series."""
    thin = [thinned(one.points, MAX_POINTS) for one in series]
    values = [value for points in thin for _, value in points]
    low, high = min(values), max(values)
    return CurveView(
        name=name,
        unit=unit,
        help=meaning,
        low=format_number(low),
        high=format_number(high),
        first_step="0",
        last_step=f"{most:,}",
        lines=tuple(_line(one, points, most, low, high) for one, points in zip(series, thin, strict=True)),
    )


def _line(series: Series, points: Points, most: int, low: float, high: float) -> CurveLine:
    placed = tuple(_placed(points, most, low, high))
    return CurveLine(
        label=series.label,
        colour=series.colour,
        final=series.final,
        path="M" + "L".join(f"{x:g} {y:g}" for x, y in placed),
        dots=placed if len(placed) <= MAX_DOTS else (),
        points=tuple((step, float(f"{value:.5g}")) for step, value in points),
    )


def _placed(points: Points, most: int, low: float, high: float) -> Iterator[tuple[float, float]]:
    span, room = high - low, HEIGHT - 2 * MARGIN
    for step, value in points:
        share = (value - low) / span if span else 0.5
        yield round(WIDTH * step / max(1, most), 2), round(HEIGHT - MARGIN - room * share, 2)
