"""The output of `hflow compare`: the runs, how they were configured differently, and what they reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hflow.base.text import pluralize
from hflow.report.text.live import sparkline
from hflow.report.text.section import add_row, dim, number, table, text

if TYPE_CHECKING:
    from hflow.launch.results.compare import Comparison, Side, Spread

CURVE_WIDTH = 24
ABSENT = "-"
LARGE = 10_000
"""From here on numbers have no decimals."""
NOTE = "final: mean of the last tenth of the values; best: the highest, of losses the lowest"
VARIES = "not all runs are deterministic (deterministic=true), so even runs of one seed may differ"


def render_comparison(comparison: Comparison) -> RenderableType:
    """Render a table of the runs, one of the configuration, and one of the metrics."""
    parts: list[RenderableType] = []
    for index, side in enumerate(comparison.sides):
        parts += list(_side_lines(index, side))
    parts.append(Text())
    letters = [side_letter(index) for index in range(len(comparison.sides))]
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
            cells = (spread_text(reached.final), spread_text(reached.best), f"{reached.best_step:,}")
            add_row(metrics, name, letters[index], *cells, curve)
    notes = [NOTE] if comparison.is_deterministic else [NOTE, VARIES]
    return Group(*parts, metrics, *map(dim, notes))


def _side_lines(index: int, side: Side) -> Iterator[Text]:
    yield Text(f"{side_letter(index)}  {side.name}, {seeds_text(side)}", "bold")
    for run, state in zip(side.runs, side.states, strict=True):
        yield Text(f"   {run}: {state}", "dim", no_wrap=True, overflow="ignore")


def names_text(comparison: Comparison) -> str:
    """Return the names of the sides: `grpo, ppo and grpo_async`."""
    *others, last = dict.fromkeys(side.name for side in comparison.sides)
    return f"{', '.join(others)} and {last}" if others else last


def seeds_text(side: Side) -> str:
    """Return `seed 0`, or `2 runs, seeds 0, 1`."""
    seeds = ", ".join(map(str, side.seeds))
    return f"{pluralize(len(side.runs), 'run')}, seeds {seeds}" if len(side.runs) > 1 else f"seed {seeds}"


def side_letter(index: int) -> str:
    """Return A to Z, then A1, B1, ..."""
    return chr(ord("A") + index % 26) + (str(index // 26) if index >= 26 else "")


def spread_text(spread: Spread) -> str:
    """Return a mean, with the standard deviation over several runs."""
    mean = f"{spread.mean:,.0f}" if abs(spread.mean) >= LARGE else f"{spread.mean:.4g}"
    return mean if spread.deviation is None else f"{mean} ± {spread.deviation:.2g}"
