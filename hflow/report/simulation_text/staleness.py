"""How old the trained samples were, as a histogram with the parts in flight and in the queue."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.text import Text

from hflow.report.plan_text.section import Section, add_row, number, table, text
from hflow.report.words import count_text, share_text

if TYPE_CHECKING:
    from hflow.runtime.simulate_plan import Simulation

NOTE = (
    "Steps that the weights moved on between a sample's oldest token and the step that trained it: while it "
    "was drawn (in flight), and while it waited for its batch (in queue). Means over the samples of each lag."
)
IN_FLIGHT, IN_QUEUE = "▒", "█"
WIDEST_BAR = 40
NUMBERS = 50
"""Columns that the numbers beside a bar take."""


def staleness_section(simulation: Simulation, width: int) -> Section:
    """A row for each lag."""
    rows: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row in simulation.run.lags:
        rows[row.in_flight + row.in_queue].append((row.in_flight, row.num_samples))
    if not rows:
        return Section("Staleness", absent="nothing is generated")
    totals = {lag: sum(num for _, num in parts) for lag, parts in rows.items()}
    room = max(1, min(WIDEST_BAR, width - NUMBERS))
    shown = table(
        number("lag"), number("samples"), number("share"), number("in flight"), number("in queue"), text("")
    )
    for lag, parts in sorted(rows.items()):
        in_flight = sum(flight * num for flight, num in parts) / totals[lag]
        columns = round(room * totals[lag] / max(totals.values()))
        cells = (count_text(part) for part in (in_flight, lag - in_flight))
        share = share_text(totals[lag] / sum(totals.values()))
        add_row(shown, str(lag), f"{totals[lag]:,}", share, *cells, _bar(columns, in_flight, lag))
    legend = Text.assemble((IN_FLIGHT, "yellow"), " in flight  ", (IN_QUEUE, "cyan"), " in queue, or fresh")
    return Section("Staleness", NOTE, (shown, legend))


def _bar(columns: int, in_flight: float, lag: int) -> Text:
    flight = round(columns * in_flight / lag) if lag else 0
    return Text.assemble((IN_FLIGHT * flight, "yellow"), (IN_QUEUE * (columns - flight), "cyan"))
