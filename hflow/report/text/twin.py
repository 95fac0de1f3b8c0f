"""The result of a twin: where two runs of one recipe differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

TOLERANCE = 1e-4
"""Largest relative difference of losses and gradient norms, in fp32."""
CHANGE_TOLERANCE = 1e-3
"""Largest difference of a model's weights, relative to how far they moved (both in the 2-norm)."""
LEAST_SCALE = 0.01
"""Smallest scale of a relative difference. A policy loss is a mean of terms near one that
cancel each other, and has their rounding error."""


@dataclass(frozen=True)
class MetricPair:
    """One metric of one step in both runs."""

    name: str
    step: int
    reference: float
    twin: float
    scale: float
    """The metric's largest finite absolute value in the reference."""

    @property
    def difference(self) -> float:
        """Return the relative difference."""
        return abs(self.twin - self.reference) / max(self.scale, LEAST_SCALE)

    @property
    def at(self) -> str:
        """Return the metric's name and step."""
        return f"{self.name} at step {self.step}"


@dataclass(frozen=True)
class WeightPair:
    """One model's weights after the last step in both runs."""

    model: str
    change: float
    """2-norm of the difference, relative to that of the reference's change since half of the steps.
    Infinite or NaN where one of the runs has such weights, which differ from all others."""


@dataclass(frozen=True)
class TwinResult:
    """One layout against one process."""

    layout: str
    """`d2t2p1`, or `as configured`."""
    metrics: tuple[MetricPair, ...]
    weights: tuple[WeightPair, ...]

    @property
    def is_equal(self) -> bool:
        """Return whether everything is within its tolerance."""
        return not (self.failed_metrics or self.failed_weights)

    @property
    def failed_metrics(self) -> tuple[MetricPair, ...]:
        """Return the metrics that differ; NaN differs from everything."""
        return tuple(pair for pair in self.metrics if not pair.difference <= TOLERANCE)

    @property
    def failed_weights(self) -> tuple[WeightPair, ...]:
        """Return the models whose weights differ."""
        return tuple(pair for pair in self.weights if not pair.change <= CHANGE_TOLERANCE)


def render_twin(
    recipe: str, steps: int, results: Sequence[TwinResult], notes: Sequence[str]
) -> RenderableType:
    """Render the report of `hflow twin`."""
    head = Text(f"{recipe}: {steps} steps, in one process and divided, in fp32", style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("layout", "largest difference of"):
        table.add_column(title, no_wrap=True)
    for title in ("step", "one process", "divided", "difference"):
        table.add_column(title, no_wrap=True, justify="right")
    table.add_column("")
    for result in results:
        for row in _rows(result):
            table.add_row(*row)
    lines = [Text(f"for this comparison {note}", style="dim") for note in notes]
    return Group(head, *lines, table, *_verdict(results))


def _rows(result: TwinResult) -> Iterator[tuple[str | Text, ...]]:
    named = str(result.layout)
    for name in dict.fromkeys(pair.name for pair in result.metrics):
        pairs = (pair for pair in result.metrics if pair.name == name)
        worst = max(pairs, key=lambda pair: (math.isnan(pair.difference), pair.difference))
        values = f"{worst.reference:.6g}", f"{worst.twin:.6g}", f"{worst.difference:.1e}"
        yield named, name, str(worst.step), *values, _mark(worst not in result.failed_metrics)
        named = ""
    for pair in result.weights:
        mark = _mark(pair not in result.failed_weights)
        yield named, f"weights of {pair.model}, of their change", "", "", "", f"{pair.change:.1e}", mark
        named = ""


def _mark(is_equal: bool) -> Text:
    return Text("ok", "green") if is_equal else Text("differs", "red")


def _verdict(results: Sequence[TwinResult]) -> Iterator[Text]:
    if all(result.is_equal for result in results):
        yield Text(
            f"equal: losses and gradient norms to {TOLERANCE:g}, weights to {CHANGE_TOLERANCE:g} of how far "
            "they moved",
            style="bold green",
        )
    for result in results:
        if not result.is_equal:
            first = min(result.failed_metrics, key=lambda pair: pair.step, default=None)
            where = f"the weights of {result.failed_weights[0].model}" if first is None else first.at
            yield Text(f"{result.layout} differs, first in {where}", style="bold red")
            if first is None:
                model = result.failed_weights[0].model
                yield Text(
                    "losses and gradient norms are equal, so rounding may be the cause: Adam makes a whole "
                    f"step from a gradient near 0. Try models.{model}.optim.eps=1e-3 with a higher lr"
                )
