"""The live panel and the plain lines of a run."""

import io
import math
import time

import pytest

from hflow.base import waiting
from hflow.base.terminal import SafeConsole
from hflow.report.text.live import LiveDisplay, LiveRow, PlainDisplay, open_display, sparkline
from hflow.runtime.records.activity import Activity, OngoingWork


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


def test_the_panel_moves_within_a_step():
    now = time.time()
    activity = Activity(
        step_start=now - 65,
        work=(
            OngoingWork("actor_train", "device", (0,), now - 12, 3),
            OngoingWork("generate x", "generate", (1,), now, 3),
        ),
        samples={"actor_gen": (384, 512), "eval_gen": (2, 40)},
        seconds_per_step=100.0,
    )
    text = io.StringIO()
    console = SafeConsole(file=text, force_terminal=False, width=120)
    with open_display("grpo", live=True, console=console) as display:
        display.follow(lambda: activity)
        display.update(LiveRow(3, 5, {"reward": 0.5}))
        assert isinstance(display, LiveDisplay)
        console.print(display._render())
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert lines[0][-2:] == ["0:02:15", "left"], "two steps without what this one has taken"
    assert lines[2] == ["now", "0:00:12", "actor_train,", "generating"]
    assert lines[3] == [
        "this",
        "step",
        "0:01:05",
        "so",
        "far",
        "384",
        "of",
        "512",
        "actor_gen",
        "2",
        "of",
        "40",
        "eval_gen",
    ]
    assert "now" not in text.getvalue().split("reward")[-1], "not of a run that has ended"


def test_the_panel_says_what_is_awaited():
    text = io.StringIO()
    console = SafeConsole(file=text, force_terminal=True, width=120, color_system=None)
    with open_display("grpo", console=console) as display, display.wait_for("Ray to start"):
        assert isinstance(display, LiveDisplay)
        console.print(display._render())
    assert "0:00:00 waiting for Ray to start" in text.getvalue()


def test_plain_lines_name_a_long_wait(monkeypatch: pytest.MonkeyPatch):
    """Each is twice as long as the one before; a short wait has no line."""
    monkeypatch.setattr(waiting, "FIRST_LINE_SECONDS", 0.05)
    text, parts = io.StringIO(), iter(["2 workers", "1 worker", "1 worker"])
    with open_display(live=False, console=SafeConsole(file=text)) as display:
        with display.wait_for(lambda: next(parts)):
            while text.getvalue().count("\n") < 2:
                time.sleep(0.01)
        lines = text.getvalue().splitlines()
        monkeypatch.setattr(waiting, "FIRST_LINE_SECONDS", 60.0)
        with display.wait_for("Ray to start"):
            assert display.awaited is not None
        assert display.awaited is None
    assert lines[:2] == ["waiting for 2 workers: 0 s", "waiting for 1 worker: 0 s"]
    assert "Ray" not in text.getvalue()
    assert waiting.wait_line("Ray to start", 20.0) == "waiting for Ray to start: 20 s"


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
