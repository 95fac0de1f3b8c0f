"""What of a run's numbers is handed to the display."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hflow.launch.compile import plan
from hflow.launch.observer import RunObserver
from hflow.report.live import Display, LiveRow
from hflow.runtime.execution.metrics_log import MetricsLog, read_metrics
from hflow.runtime.execution.trace import Trace

ROOT = Path(__file__).parents[2]
BUSY = {"time/step_seconds": 2.0, "busy/engines": 0.5, "busy/trainers": 0.25}
COUNTS = {"rollout/running": 3.0, "rollout/queued": 1.0, "rollout/accepted": 9.0, "rollout/version": 4.0}


class Recorded(Display):
    """A display that keeps what it was given."""

    def __init__(self) -> None:
        self.rows: list[LiveRow] = []
        self.glances: list[LiveRow] = []

    def update(self, row: LiveRow) -> None:
        self.rows.append(row)

    def glance(self, row: LiveRow) -> None:
        self.glances.append(row)

    def note(self, text: str) -> None:
        raise AssertionError(text)


@pytest.mark.parametrize(
    ("recipe", "metrics", "shown"),
    [
        (
            "recipes/tool_agent.py",
            {
                "agent/reward": 0.5,
                "agent/num_calls": 2.0,
                "eval_agent/accuracy": 0.25,
                "actor_train/loss": 1.0,
            },
            {"reward": 0.5, "held-out accuracy": 0.25, "loss": 1.0},
        ),
        (
            "tests/integration/recipes/judged.py",
            {
                "actor_gen/rm_score": 2.0,
                "actor_gen/reward": 1.5,
                "eval_gen/reward": 3.0,
                "actor_gen/length": 7.0,
            },
            {"rm_score": 2.0, "reward": 1.5, "held-out reward": 3.0},
        ),
        (
            "tests/graphs/good/tool_agent.py",
            {"rm_view/rm_score": 2.0, "agent/judge_score": 1.0, "agent/reward": 1.5},
            {"rm_score": 2.0, "judge_score": 1.0, "reward": 1.5},
        ),
    ],
)
def test_what_samples_are_given_is_shown(
    tmp_path: Path, recipe: str, metrics: dict[str, float], shown: dict[str, float]
) -> None:
    """Whoever gives it: an episode, a body, a model that judges, on the stream itself or on one beside it."""
    display = Recorded()
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(plan(ROOT / recipe, []), log, Trace(), display)
        seen.on_step(0, {**BUSY, **metrics})
    assert [row.values for row in display.rows] == [shown]


@pytest.mark.parametrize(("staleness", "shows"), [(0, False), (2, True)])
def test_the_rollout_is_shown_between_steps_where_it_runs_ahead(
    tmp_path: Path, staleness: int, shows: bool
) -> None:
    display = Recorded()
    asked = [f"schedule.max_staleness={staleness}"]
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(plan(ROOT / "recipes/grpo_async.py", asked), log, Trace(), display)
        seen.on_step(0, {**BUSY, **COUNTS})
        seen.on_rollout({**COUNTS, "rollout/running": 7.0})
    (glance,) = display.glances
    assert (glance.step, glance.values) == (1, {})
    assert (glance.rollout is not None) is shows
    if glance.rollout is not None:
        assert (glance.rollout.running, glance.rollout.accepted, glance.rollout.engines) == (7, 9, 0.5)
    assert [row["rollout/running"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [3.0]
