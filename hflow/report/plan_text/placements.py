"""The section on the placements that the planner compared, with a reason for each."""

from __future__ import annotations

from rich.text import Text

from hflow.planner.forecast import Candidate
from hflow.planner.ir import Plan
from hflow.report.formatting import seconds_text
from hflow.report.plan_text.section import Section, add_row, dim, lines, number, table, text

NOTE = (
    "The best plan of each way in which replicas may share devices; the first one is this plan. What the "
    "configuration sets was not changed. Seconds leave out what the inputs of nodes move."
)


def placements_section(plan: Plan, width: int) -> Section:
    """Return a row for each candidate of the search."""
    candidates = plan.forecast.candidates if plan.forecast is not None else ()
    shown = table(number("step"), text("placement, and why not"))
    for candidate in candidates:
        what = [Text(candidate.why, style="bold"), Text(candidate.placement)]
        add_row(shown, seconds_text(candidate.seconds), lines([*what, *map(dim, _settings(candidate))]))
    return Section("Placements", NOTE, (shown,))


def _settings(candidate: Candidate) -> list[str]:
    """Return the settings that the search changed in one line, if there are any."""
    texts = [f"{key}={str(value).lower()}" for key, value in candidate.settings]
    return [" ".join(texts)] if texts else []
