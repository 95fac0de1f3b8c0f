"""Files that a process leaves half-written when it is killed, and the process that continues after it."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from hflow.base.durable_files import replace_text
from hflow.base.errors import ConfigError
from hflow.launch.targets import resolve
from hflow.runtime.records.metric_columns import drop_rows_after, read_curves
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.saving.checkpoint import BEST, LATEST, Checkpoints, replace_link
from hflow.runtime.saving.run_directory import RunDirectory, read_metrics


def test_half_a_row_of_metrics_is_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    with closing(MetricsLog(path, tmp_path)) as log:
        log.write(2, {"loss": 0.25})
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]


def test_a_link_is_replaced_though_a_process_of_the_same_id_was_killed(tmp_path: Path):
    for name in (LATEST, BEST):
        (tmp_path / f".{name}-{os.getpid()}").symlink_to("step-1")
    replace_link(tmp_path / LATEST, "step-2")
    assert os.readlink(tmp_path / LATEST) == "step-2"
    Checkpoints(tmp_path).drop_unfinished()
    assert [path.name for path in tmp_path.iterdir()] == [LATEST]


def test_latest_is_the_newest_checkpoint_of_a_run_that_was_killed(tmp_path: Path):
    for step in (5, 6):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / LATEST).symlink_to("step-5")
    Checkpoints(tmp_path).link_latest()
    assert os.readlink(tmp_path / LATEST) == "step-6"


def test_a_text_file_has_the_old_or_the_new_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plan.json"
    replace_text(path, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", _killed)
        with pytest.raises(KeyboardInterrupt):
            replace_text(path, "new")
    assert path.read_text() == "old"
    replace_text(path, "new")
    assert [(other.name, other.read_text()) for other in tmp_path.iterdir()] == [("plan.json", "new")]


def test_a_run_has_a_plan_or_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """So a run that is killed at any time either never was, or can be resumed."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", _killed)
        with pytest.raises(KeyboardInterrupt):
            RunDirectory.create(tmp_path, "grpo", "steps: 2\n", "{}\n")
    assert list((tmp_path / "grpo").iterdir()) == []
    first, second = (RunDirectory.create(tmp_path, "grpo", "steps: 2\n", "{}\n") for _ in range(2))
    assert first.path != second.path
    assert first.plan.read_text() == second.plan.read_text() == "{}\n"


def test_a_run_that_was_never_ready_is_named(tmp_path: Path):
    run = RunDirectory.create(tmp_path, "grpo", "steps: 2\n", "{}\n")
    with pytest.raises(ConfigError, match=f"has no latest run.*name a run, such as {run.path}"):
        resolve(str(tmp_path / "grpo"))
    run.plan.unlink()
    with pytest.raises(ConfigError, match=r"has no plan\.json, so it is not a run's directory"):
        resolve(str(run.path)).require_run()


def _killed(self: Path, target: Path) -> Path:
    raise KeyboardInterrupt


def test_a_resumed_run_keeps_its_best_checkpoint(tmp_path: Path):
    for step in (2, 4, 6):
        (tmp_path / f"step-{step}").mkdir()
    checkpoints = Checkpoints(tmp_path, keep=1, best="e/x")
    checkpoints.restore_values({"e/x": [(2, 0.9), (4, 0.5)], "loss": [(6, 1.0)]})
    checkpoints.add_values(6, {"e/x": 0.6})
    assert checkpoints.steps == [2, 6]
    assert (tmp_path / "best").readlink() == Path("step-2")


def test_checkpoints_after_the_one_that_a_run_continues_from_are_set_aside(tmp_path: Path):
    for step in (2, 4, 6):
        (tmp_path / f"step-{step}").mkdir()
    (tmp_path / "best").symlink_to("step-6")
    checkpoints = Checkpoints(tmp_path, best="e/x")
    assert checkpoints.rewind(2) == ["before-rewind-step-4", "before-rewind-step-6"]
    assert (checkpoints.last, (tmp_path / "latest").readlink()) == (2, Path("step-2"))
    assert (tmp_path / "before-rewind-step-6").is_dir()
    assert not (tmp_path / "best").is_symlink()


def test_metrics_after_the_point_that_a_run_continues_from_are_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2, "a": 0.5}\n{"step": 3, "a": 1}\n{"step": 1, "b": null}\n')
    drop_rows_after(path, 2)
    assert path.read_text() == '{"step": 2, "a": 0.5}\n{"step": 1, "b": null}\n'


@pytest.mark.parametrize("last", [0, 99, 100, 101, 250])
def test_rows_of_whole_blocks_are_kept_as_they_are(tmp_path: Path, last: int):
    path, steps = tmp_path / "metrics.jsonl", range(1, 251)
    with closing(MetricsLog(path, tmp_path / "tensorboard")) as log:
        for step in steps:
            log.write(step, {"a": step / 3})
    lines = path.read_bytes().splitlines(keepends=True)
    drop_rows_after(path, last)
    assert path.read_bytes().splitlines(keepends=True) == lines[:last]
    with closing(MetricsLog(path, tmp_path / "tensorboard")) as log:
        log.write(last + 1, {"a": -1.0})
    assert [*read_curves(path)["a"]] == [*((step, step / 3) for step in steps[:last]), (last + 1, -1.0)]
