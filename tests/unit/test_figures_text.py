"""Durations and the table of `hflow size` as text."""

import pytest

from hflow.launch.size import SizedCluster
from hflow.planner.plan_figures import PlanFigures
from hflow.report.figures_text import SIZE_HEADINGS, size_cells
from hflow.report.formatting import seconds_text


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (12e-6, "12 µs"),
        (0.83, "830 ms"),
        (590, "590 s"),
        (600, "10 min"),
        (1380, "23 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (18720, "5.2 h"),
        (172_799, "48 h"),
        (172_800, "2 days"),
        (267_840, "3.1 days"),
        (1e8, "1157 days"),
    ],
)
def test_durations_have_the_unit_that_a_person_reads(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


@pytest.mark.parametrize(("days", "expected"), [(23 / 1440, "23 min"), (36 / 1440, "36 min"), (None, "-")])
def test_runs_of_minutes_differ_in_the_table_of_sizes(days: float | None, expected: str) -> None:
    figures = PlanFigures("cpu-1x2", 2, 5.0, 100.0, days, 2**30, 2**33, None, None, None)
    cells = size_cells(SizedCluster("cpu-1x2", 2, figures, True))
    assert dict(zip(SIZE_HEADINGS, cells, strict=True))["whole run"] == expected
