"""Metrics that a run passes to the display."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from hflow.base.errors import ConfigError
from hflow.config.schema import ReportConfig
from hflow.launch.planning.compile import plan
from hflow.launch.running.run_observer import RunObserver
from hflow.launch.running.shown_metrics import builtin_metrics
from hflow.report.text.live import Display, LiveRow
from hflow.runtime.records.activity import OngoingWork
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.run_directory import read_metrics

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\{(\w+)\}")
BUSY = {"time/step_seconds": 2.0, "busy/engines": 0.5, "busy/trainers": 0.25}
COUNTS = {"rollout/running": 3.0, "rollout/queued": 1.0, "rollout/accepted": 9.0, "rollout/version": 4.0}


class Recorded(Display):
    """A display that keeps what it was given."""

    def __init__(self) -> None:
        self.rows: list[LiveRow] = []
        self.refreshed: list[LiveRow] = []

    def update(self, row: LiveRow) -> None:
        self.rows.append(row)

    def refresh(self, row: LiveRow) -> None:
        self.refreshed.append(row)

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
                "actor_train/entropy": 0.75,
                "agent/num_tokens": 9.0,
                "eval_agent/num_tokens": 8.0,
            },
            {
                "reward": 0.5,
                "held-out accuracy": 0.25,
                "loss": 1.0,
                "entropy": 0.75,
                "mean length": 9.0,
            },
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
def test_rewards_and_scores_are_shown(
    tmp_path: Path, recipe: str, metrics: dict[str, float], shown: dict[str, float]
) -> None:
    """By an episode, a body or a reward model, on the stream itself or on a derived one."""
    display = Recorded()
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(plan(ROOT / recipe, []), log, Trace(), display)
        seen.on_step(0, {**BUSY, **metrics})
    assert [row.values for row in display.rows] == [shown]


@pytest.mark.parametrize(("staleness", "shows"), [(0, False), (2, True)])
def test_the_rollout_is_shown_between_steps_of_an_asynchronous_run(
    tmp_path: Path, staleness: int, shows: bool
) -> None:
    display = Recorded()
    asked = [f"schedule.max_staleness={staleness}"]
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(plan(ROOT / "recipes/grpo_async.py", asked), log, Trace(), display)
        seen.on_step(0, {**BUSY, **COUNTS})
        seen.on_rollout({**COUNTS, "rollout/running": 7.0}, {})
    (refreshed,) = display.refreshed
    assert (refreshed.step, refreshed.values) == (1, {})
    assert (refreshed.rollout is not None) is shows
    if refreshed.rollout is not None:
        assert (refreshed.rollout.num_running, refreshed.rollout.num_accepted, refreshed.rollout.engines) == (
            7,
            9,
            0.5,
        )
    assert [row["rollout/running"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [3.0]


def test_the_activity_of_a_run_is_what_its_workers_do_now(tmp_path: Path) -> None:
    display = Noted()
    trained = OngoingWork("actor_train", "device", (0, 1), 20.0, 3)
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(plan(ROOT / "recipes/grpo_async.py", []), log, Trace(), display)
        with seen.wait_for("Ray to start"):
            waiting = seen.activity()
        assert waiting.phase is not None
        assert (waiting.phase[0], waiting.step_start) == ("waiting for Ray to start", None)
        seen.on_begin(trained)
        seen.on_rollout(COUNTS, {"actor_gen": (3, 8)})
        seen.on_warning("be careful")
        now = seen.activity()
        assert (now.work, now.samples, now.warnings) == ((trained,), {"actor_gen": (3, 8)}, ("be careful",))
        assert now.phase == ("actor_train", 20.0)
        assert now.step_start is not None
        seen.on_step(0, BUSY)
        seen.on_finish(trained)
        after = seen.activity()
        assert (after.work, after.seconds_per_step) == ((), BUSY["time/step_seconds"])
        with seen.wait_for("workers to start"):
            assert seen.activity().samples == {}, "nothing of a start before"


def test_report_show_picks_other_metrics(tmp_path: Path) -> None:
    """In the order of the patterns; what has a label by default keeps it."""
    display = Recorded()
    report = ReportConfig(show=("staleness/*", "actor_train/loss", "time/step_seconds"))
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(plan(ROOT / "recipes/grpo_async.py", []), log, Trace(), display, report)
        seen.on_step(0, {**BUSY, "actor_gen/reward": 1.0, "actor_train/loss": 0.5, "staleness/max": 2.0})
    (row,) = display.rows
    assert list(row.values.items()) == [("staleness/max", 2.0), ("loss", 0.5), ("time/step_seconds", 2.0)]


class Noted(Recorded):
    """A display that also keeps notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def warned(tmp_path: Path, overrides: list[str], *kls: float, **report: float | None) -> list[str]:
    """Return what a run is warned of whose steps measure these KLs."""
    rows = [{"actor_train/engine_kl": kl} for kl in kls]
    return warned_of_steps(tmp_path, rows, overrides, ReportConfig(**report))


def warned_of_steps(
    tmp_path: Path,
    rows: Sequence[Mapping[str, float]],
    overrides: Sequence[str] = (),
    report: ReportConfig | None = None,
) -> list[str]:
    """Return what a run is warned of whose steps have these metrics."""
    display = Noted()
    compiled = plan(ROOT / "recipes/grpo.py", overrides)
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path)) as log:
        seen = RunObserver(compiled, log, Trace(), display, report)
        for step, row in enumerate(rows):
            seen.on_step(step, {**BUSY, **row})
    assert seen.warnings == display.notes
    return display.notes


def test_a_large_gap_is_warned_of_once_and_when_it_doubles(tmp_path: Path) -> None:
    notes = warned(tmp_path, [], 0.001, 0.02, 0.03, 0.02, 0.05, 0.09, float("nan"), float("nan"))
    steps = [re.findall(r"engine_kl is (\S+) in step (\d)", note)[0] for note in notes]
    assert steps == [("0.02", "2"), ("0.05", "5"), ("nan", "7")]
    assert "nodes.actor_train.prox=recompute nodes.actor_train.over_cap=truncate" in notes[0]
    assert "models.actor.dtype=fp32" in notes[0]


def test_a_corrected_gap_names_its_cap(tmp_path: Path) -> None:
    (note,) = warned(tmp_path, ["nodes.actor_train.prox=recompute"], 0.02)
    assert note.endswith("corrected up to nodes.actor_train.behav_weight_cap=5.0.")


@pytest.mark.parametrize("key", ["quantization", "cache_dtype"])
def test_the_gap_of_a_quantised_engine_names_its_quantisation(tmp_path: Path, key: str) -> None:
    setting = f"models.actor.gen.{key}"
    quantized = ["models.actor.gen.engine=vllm", f"{setting}=fp8", "models.actor.dtype=bf16"]
    (note,) = warned(tmp_path, quantized, 0.02)
    assert f"Likely causes are a low precision (try {setting}=null)" in note


def test_the_limit_of_the_gap_can_be_set(tmp_path: Path) -> None:
    assert warned(tmp_path, [], 0.02, max_engine_kl=0.02) == []
    assert len(warned(tmp_path, [], 0.02, max_engine_kl=0.019)) == 1
    assert warned(tmp_path, [], 1e9, max_engine_kl=None) == []


def test_a_model_without_a_gradient_for_five_steps_is_warned_of_once(tmp_path: Path) -> None:
    idle = {"actor_train/num_tokens": 8.0, "actor_gen/reward": 0.0}
    still = {**idle, "actor_train/loss": 0.0, "actor_train/grad_norm": 1e-9}
    learns = {**still, "actor_train/grad_norm": 0.1}  # the loss of a policy at its own samples is 0 too
    assert warned_of_steps(tmp_path, [still] * 4 + [learns] + [still] * 4 + [learns] * 9) == []
    (note,) = warned_of_steps(tmp_path, [learns, *[still] * 20])
    assert "actor_train had no gradient in steps 2 to 6, so actor learns nothing" in note
    assert "actor_gen/reward was 0 in all of them. Likely causes:" in note
    assert "answers are cut" not in note
    assert note.endswith("hflow samples grpo --text")
    cut, note = warned_of_steps(tmp_path, [{**still, "actor_gen/truncated": 0.75}] * 5)
    assert "75% of the samples of actor_gen" in cut
    assert "answers are cut (actor_gen/truncated is 0.75)" in note
    (note,) = warned_of_steps(tmp_path, [{**idle, "actor_train/num_tokens": 0.0}] * 5)
    assert note.endswith("No token of its batches is learned: actor_train/num_tokens is 0.")
    (note,) = warned_of_steps(tmp_path, [{**idle, "actor_train/skipped_updates": 2.0}] * 5)
    assert "gradient was not finite were skipped: see actor_train/skipped_updates" in note


@pytest.mark.first(3)
@pytest.mark.parametrize(
    "name",
    [
        "time/step_seconds",
        "*/loss",
        "refused/keep",
        "staleness/lag_3",
        "actor_train/mine",
        "actor_gen/reward",
        "actor_gen/tool_errors",
    ],
)
def test_a_metric_that_the_recipe_can_have_may_be_shown(name: str) -> None:
    plan(ROOT / "recipes/grpo_async.py", [f"report.show=['{name}']"])


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("time/step_second", "time/step_seconds"),
        ("actor_gen/rewrd", "actor_gen/reward"),
        ("actor_trian/loss", "actor_train/loss"),
    ],
)
def test_a_metric_that_cannot_exist_is_refused(name: str, nearest: str) -> None:
    with pytest.raises(
        ConfigError, match=f"report.show: '{name}' is not a metric .* did you mean '{nearest}'"
    ):
        plan(ROOT / "recipes/grpo_async.py", [f"report.show=['{name}']"])


def test_every_metric_is_explained_in_the_docs() -> None:
    table = (ROOT / "docs/metrics.md").read_text()
    metrics = builtin_metrics()
    assert len(metrics) > 30
    for metric in metrics:
        name = PLACEHOLDER.sub(lambda part: part[1].upper(), metric.name)
        assert f"| `{name}` | {metric.unit} | {metric.help} |" in table
