"""The output of `hflow compare`: the runs, how they were configured differently, and what they reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hflow.report.formatting import plural
from hflow.report.live import sparkline
from hflow.report.plan_text.section import add_row, dim, number, table, text

if TYPE_CHECKING:
    from hflow.launch.compare_runs import Comparison, Side, Spread

CURVE_WIDTH = 24
ABSENT = "-"
NOTE = "final: mean of the last tenth of the values; best: the highest, of losses the lowest"


def render_comparison(comparison: Comparison) -> RenderableType:
    """Render a table of the runs, one of the configuration, and one of the metrics."""
    parts: list[RenderableType] = []
    for index, side in enumerate(comparison.sides):
        parts += list(_side_lines(index, side))
    parts.append(Text())
    letters = [_letter(index) for index in range(len(comparison.sides))]
    if comparison.config:
        shown = table(text("configuration"), *(text(letter) for letter in letters))
        for key, values in comparison.config:
            add_row(shown, key, *(value or ABSENT for value in values))
        parts += [shown, Text()]
    elif len(comparison.sides) == 1:
        parts += [dim("the runs have the same configuration, except for their seeds"), Text()]
    metrics = table(
        text("metric"), text(""), number("final"), number("best"), number("at step"), text("curve")
    )
    for metric in comparison.metrics:
        for index, reached in enumerate(metric.values):
            name = Text(metric.name if index == 0 else "")
            if reached is None:
                add_row(metrics, name, letters[index], ABSENT, ABSENT, ABSENT, "")
                continue
            curve = Text(sparkline([value for _, value in reached.curve], CURVE_WIDTH), style="cyan")
            cells = (_spread(reached.final), _spread(reached.best), f"{reached.best_step:,}")
            add_row(metrics, name, letters[index], *cells, curve)
    return Group(*parts, metrics, dim(NOTE))


def _side_lines(index: int, side: Side) -> Iterator[Text]:
    """Yield the heading of a side, then a line for each run."""
    seeds = ", ".join(map(str, side.seeds))
    several = f", {plural(len(side.runs), 'run')}" if len(side.runs) > 1 else ""
    yield Text(f"{_letter(index)}  {side.name}{several}, seed{'s' * (len(side.seeds) > 1)} {seeds}", "bold")
    for run, state in zip(side.runs, side.states, strict=True):
        yield Text(f"   {run}: {state}", "dim", no_wrap=True, overflow="ignore")


def _letter(index: int) -> str:
    """Return A to Z, then A1, B1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def _spread(spread: Spread) -> str:
    deviation = "" if spread.deviation is None else f" ± {spread.deviation:.2g}"
    return f"{spread.mean:.4g}{deviation}"
