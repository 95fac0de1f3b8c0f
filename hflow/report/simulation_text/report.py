"""The whole report of a simulated run: a head with the verdicts, staleness, and some steps drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

from hflow.report.plan_text.section import WIDEST, shown
from hflow.report.simulation_text.chart import chart_section
from hflow.report.simulation_text.header import header
from hflow.report.simulation_text.staleness import staleness_section

if TYPE_CHECKING:
    from hflow.runtime.simulate_plan import Simulation


class SimulationReport:
    """A simulated run as something that rich can print at any width."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The parts, for the width that the console has."""
        width = min(options.max_width, WIDEST)
        for part in self._parts(width):
            yield from console.render(part, options.update(width=width))

    def _parts(self, width: int) -> Iterator[RenderableType]:
        yield header(self._simulation)
        for section in (staleness_section(self._simulation, width), chart_section(self._simulation, width)):
            if not section.absent:
                yield from shown(section)


def render_simulation(simulation: Simulation) -> RenderableType:
    """The report of a simulated run, as wide as the console on which it is printed and at most `WIDEST`."""
    return SimulationReport(simulation)
