"""Generation of an asynchronous run, in the panel and in plain lines."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import pytest
from rich.console import Console

from hflow.launch.running.run_observer import WINDOW, RolloutTracker
from hflow.report.text.live import MAX_BINS, LiveRow, RolloutView, open_display

STEP = {
    "time/step_seconds": 0.5,
    "busy/engines": 0.96,
    "busy/trainers": 0.5,
    "rollout/version": 29,
    "rollout/running": 64,
    "rollout/queued": 32,
    "rollout/accepted": 7680,
    "refused/keep": 3,
    "refused/failed": 1,
    "dropped/stale": 2,
    "rollout/interrupted": 700,
    "rollout/kept_tokens": 2100,
    "staleness/max": 2,
    "staleness/lag_1": 0.25,
    "staleness/lag_2": 0.75,
    "staleness/in_flight_0": 0.5,
    "staleness/in_flight_1": 0.5,
    "staleness/in_queue_1": 1.0,
}
SLOWER = {
    **STEP,
    "time/step_seconds": 1.5,
    "busy/engines": 0.48,
    "staleness/lag_2": 0.0,
    "staleness/lag_3": 0.75,
}
SLOWER["staleness/max"] = 3
EPISODES = {"episodes/generating": 98, "episodes/processing_tools": 4, "episodes/terminated": 123456}


def tracker(*rows: Mapping[str, float], runs_ahead: bool = True, **present: float) -> RolloutTracker:
    made = RolloutTracker(runs_ahead=runs_ahead)
    for row in rows:
        made.add_step(row)
    made.update(present)
    return made


def shown(rollout: RolloutView | None, width: int = 80, *, live: bool = True) -> list[str]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=False, width=width)
    with open_display("grpo_async", live=live, console=console) as display:
        values = {"reward": 0.5, "held-out accuracy": -0.0001234}
        display.update(LiveRow(20, 280, values, 24850.0, 0.5, rollout))
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def test_the_panel_of_a_run_ahead_fits_80_columns() -> None:
    lines = shown(tracker(STEP, STEP, **EPISODES).view())
    assert max(map(len, lines)) <= 80
    head, reward, accuracy, version, busy, groups, *rest = map(str.split, lines)
    assert {"grpo_async", "20/280", "24,850", "0:02:10"} <= set(head)
    assert (reward[1], accuracy[2]) == ("0.5", "-0.0001234")
    assert version[:2] == ["version", "29"]
    assert [word for word in busy if word.isdigit()] == ["96", "50"]
    assert groups[1:] == ["64", "running", "32", "queued", "7,680", "accepted"]
    refused, dropped, interrupted, staleness, lag, in_flight, in_queue, names, episodes = rest
    assert (refused[1], refused[-1]) == ("8", "keep")
    assert (dropped[1], dropped[-1]) == ("4", "stale")
    assert (interrupted[1], interrupted[3]) == ("1,400", "4,200")
    assert staleness == ["staleness", "mean", "max", "0", "1", "2"]
    assert lag == ["lag", "1.75", "2", "·", "25%", "75%"]
    assert in_flight == ["in", "flight", "0.50", "50%", "50%", "·"]
    assert in_queue == ["in", "queue", "1.00", "·", "100%", "·"]
    assert names[:3] == ["episodes", "pending", "generating"]
    assert episodes == ["0", "98", "4", "0", "123,456"]


def test_a_wide_terminal_changes_only_the_bar() -> None:
    rollout = tracker(STEP).view()
    assert shown(rollout, 120)[1:] == shown(rollout, 80)[1:]


def test_lines_keep_their_places() -> None:
    first, later = (shown(rollout) for rollout in (tracker().view(), tracker(STEP, SLOWER).view()))
    assert [line[:17].rstrip() for line in first] == [line[:17].rstrip() for line in later]


def test_lags_beyond_the_last_column_are_in_it() -> None:
    far = {"staleness/max": 40, "staleness/lag_8": 0.25, "staleness/lag_9": 0.25, "staleness/lag_40": 0.5}
    lines = shown(tracker({"time/step_seconds": 1, "busy/engines": 1, "busy/trainers": 1, **far}).view())
    heads, lag = (next(line for line in lines if line.startswith(name)) for name in ("staleness", "  lag"))
    assert heads.split()[-1] == f"{MAX_BINS - 1}+"
    assert lag.split()[-1] == "100%"
    assert lag.split()[1:3] == ["24.25", "40"]
    assert max(map(len, lines)) <= 80


def test_a_synchronous_run_shows_no_rollout() -> None:
    assert tracker(STEP, runs_ahead=False).view() is None
    assert [line.split()[0] for line in shown(None)] == ["grpo_async", "reward", "held-out"]


def test_a_synchronous_run_with_turns_shows_its_episodes() -> None:
    lines = shown(tracker(STEP, runs_ahead=False, **EPISODES).view())
    assert [line.split()[0] for line in lines[:4]] == ["grpo_async", "reward", "held-out", "episodes"]
    assert "123,456" in lines[4]
    plain = shown(tracker(STEP, runs_ahead=False, **EPISODES).view(), live=False)
    assert "staleness" not in plain[0]


def test_a_plain_line_has_staleness_and_busy_shares() -> None:
    (line,) = shown(tracker(STEP, SLOWER).view(), live=False)
    parts = line.split("  ")
    assert {"step 20/280", "reward 0.5", "engines 60 %", "trainers 50 %", "24,850 tokens/s"} <= set(parts)
    (staleness,) = [part for part in parts if part.startswith("staleness")]
    assert re.findall(r"[\d.]+", staleness) == ["2.12", "3"]


def test_means_are_over_the_last_steps_and_sums_since_the_start() -> None:
    """Shares of time are weighted by time; versions and groups are the newest."""
    old = [STEP] * 5
    rollout = tracker(*old, *[SLOWER] * WINDOW, **{"rollout/version": 77.0, "rollout/running": 3}).view()
    assert rollout is not None
    assert (rollout.engines, rollout.lags.maximum) == (pytest.approx(0.48), 3)
    assert rollout.lags.total == {1: pytest.approx(0.25), 2: 0.0, 3: pytest.approx(0.75)}
    assert sum(rollout.refused.values()) == 4 * (5 + WINDOW)
    assert list(rollout.dropped) == ["stale"]
    assert (rollout.version, rollout.num_running, rollout.num_queued) == (77, 3, 32)
