"""The live panel and the plain lines of a run."""

import io
import math

import pytest

from hflow.base.terminal import SafeConsole
from hflow.report.text.live import LiveDisplay, LiveRow, PlainDisplay, open_display, sparkline


def shown(live: bool | None, terminal: bool, rows: list[LiveRow]) -> str:
    text = io.StringIO()
    console = SafeConsole(file=text, force_terminal=terminal, width=120, color_system=None)
    with open_display("grpo", live=live, console=console) as display:
        for row in rows:
            display.update(row)
        display.note("saved [bold]here[/bold]")
    return text.getvalue()


def rows_to(last: int) -> list[LiveRow]:
    evaluated = {10: 0.25, 20: 0.5}
    return [
        LiveRow(
            step,
            last,
            {"reward": step / last} | ({"heldout": evaluated[step]} if step in evaluated else {}),
            tokens_per_second=12345.6,
            seconds_per_step=61.0,
        )
        for step in range(1, last + 1)
    ]


def test_plain_lines_come_first_last_and_every_tenth():
    lines = [line.split("  ") for line in shown(None, False, rows_to(25)).splitlines()]
    assert [line[0] for line in lines] == [
        *("step 1/25", "step 10/25", "step 20/25", "step 25/25"),
        "saved [bold]here[/bold]",
    ]
    assert "heldout 0.25" in lines[1]
    assert lines[2][1:] == ["reward 0.8", "heldout 0.5", "12,346 tokens/s", "0:05:05 left"]
    assert "heldout 0.5" in lines[3]


def test_a_late_evaluation_prints_its_own_line():
    rows = [LiveRow(1, 2, {"reward": 0.5}), LiveRow(1, 2, {"heldout": 0.25}), LiveRow(2, 2, {"reward": 0.75})]
    lines = shown(False, False, rows).splitlines()
    assert lines[1] == "step 1/2  heldout 0.25"
    assert lines[2].startswith("step 2/2  reward 0.75  heldout 0.25")


def test_an_evaluation_without_shown_metrics_prints_no_line():
    rows = [LiveRow(0, 2), LiveRow(1, 2, {"reward": 0.5}), LiveRow(1, 2)]
    assert [line[:10] for line in shown(False, False, rows).splitlines()] == ["step 1/2  ", "saved [bol"]


def test_the_panel_shows_the_last_row_and_the_curves():
    panel = shown(None, True, rows_to(8))
    assert "step 8/8" in panel
    assert "▁▂▃▄▅▆▇█" in panel
    assert "saved [bold]here[/bold]" in panel


@pytest.mark.parametrize(
    ("live", "terminal", "kind"),
    [
        (None, True, LiveDisplay),
        (None, False, PlainDisplay),
        (True, False, LiveDisplay),
        (False, True, PlainDisplay),
    ],
)
def test_the_terminal_selects_the_display_by_default(live: bool | None, terminal: bool, kind: type):
    console = SafeConsole(file=io.StringIO(), force_terminal=terminal)
    assert type(open_display(live=live, console=console)) is kind


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 4, ""),
        ([3.0], 4, "▁"),
        ([2.0, 2.0], 4, "▁▁"),
        ([0.0, 7.0], 4, "▁█"),
        ([0.0, math.nan, 7.0, math.inf], 4, "▁█"),
        ([0, 0, 7, 7, 3, 3], 3, "▁█▄"),
    ],
)
def test_sparkline(values: list[float], width: int, curve: str):
    assert sparkline(values, width) == curve
