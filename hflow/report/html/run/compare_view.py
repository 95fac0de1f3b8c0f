"""Everything that the page of a comparison shows, as one value of plain texts and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hflow.base.text import pluralize
from hflow.report.html.plan.devices import NUM_COLOURS
from hflow.report.html.run.curves import CurveView, Series, curve_view
from hflow.report.tables import TableView
from hflow.report.text.compare import ABSENT, NOTE, names_text, seeds_text, side_letter, spread_text

if TYPE_CHECKING:
    from hflow.launch.results.compare import ComparedMetric, Comparison, ReachedValues

SEEDS_NOTE = "Where a letter has several runs, its curve is their mean."


@dataclass(frozen=True)
class SideView:
    """Runs with the same configuration."""

    letter: str
    colour: int
    name: str
    seeds: str
    runs: tuple[str, ...]
    """Each run's directory, and how it ended."""


@dataclass(frozen=True)
class ComparePageView:
    """The page."""

    title: str
    verdict: str
    sides: tuple[SideView, ...]
    curves: tuple[CurveView, ...]
    note: str
    values: TableView
    values_note: str
    config: TableView | None
    """None: the configurations are equal."""


def compare_page_view(comparison: Comparison) -> ComparePageView:
    """Return the content of a comparison's page."""
    sides = tuple(
        SideView(
            letter=side_letter(i),
            colour=_colour(i),
            name=side.name,
            seeds=seeds_text(side),
            runs=tuple(f"{run}: {state}" for run, state in zip(side.runs, side.states, strict=True)),
        )
        for i, side in enumerate(comparison.sides)
    )
    num_runs = sum(len(side.runs) for side in comparison.sides)
    differ = "differs" if len(comparison.config) == 1 else "differ"
    keys = f"{pluralize(len(comparison.config), 'key')} of the configuration {differ}"
    letters = tuple(side.letter for side in sides)
    return ComparePageView(
        title=names_text(comparison),
        verdict=f"{pluralize(num_runs, 'run')}; {keys}.",
        sides=sides,
        curves=tuple(map(_plot, comparison.metrics)),
        note=SEEDS_NOTE if num_runs > len(sides) else "",
        values=_values(comparison, letters),
        values_note=f"{NOTE[0].upper()}{NOTE[1:]}.",
        config=TableView(
            "Keys that differ",
            ("key", *letters),
            tuple((key, *(value or ABSENT for value in values)) for key, values in comparison.config),
        )
        if comparison.config
        else None,
    )


def _plot(metric: ComparedMetric) -> CurveView:
    reached = [(i, values) for i, values in enumerate(metric.values) if values is not None]
    series = [
        Series(values.curve, spread_text(values.final), side_letter(i), _colour(i)) for i, values in reached
    ]
    return curve_view(metric.name, series, max(values.curve[-1][0] for _, values in reached))


def _values(comparison: Comparison, letters: tuple[str, ...]) -> TableView:
    """Return final and best value of each metric, with a row for each side."""
    rows = [
        (metric.name if i == 0 else "", letters[i], *_cells(values))
        for metric in comparison.metrics
        for i, values in enumerate(metric.values)
    ]
    columns = ("metric", "", "final", "best", "at step")
    return TableView("Final and best values", columns, tuple(rows), right=(2, 3, 4))


def _cells(values: ReachedValues | None) -> tuple[str, str, str]:
    if values is None:
        return ABSENT, ABSENT, ABSENT
    return spread_text(values.final), spread_text(values.best), f"{values.best_step:,}"


def _colour(side: int) -> int:
    """Return the number of a side's colour, from 1."""
    return side % NUM_COLOURS + 1
