import json
import math
import os
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from hflow.base.errors import ConfigError
from hflow.launch.running.shown_metrics import builtin_metrics
from hflow.runtime.execution.batch_runner import _shorten
from hflow.runtime.records.metric_columns import BLOCK_ROWS, _blocks, read_curves
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.saving.run_directory import RunDirectory, read_metrics


def test_rows_are_on_disk_before_the_log_is_closed(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tb")
    log.write(1, {"reward": 0.5, "batch/samples": 8})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.5, "batch/samples": 8}]
    log.close()


def test_non_finite_metrics_are_null_in_json(tmp_path: Path):
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tb")
    log.write(2, {"loss": math.nan, "norm": math.inf, "kl": 0.0})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 2, "loss": None, "norm": None, "kl": 0.0}


def test_a_second_log_appends(tmp_path: Path):
    for step in (1, 2):
        log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tb")
        log.write(step, {"reward": float(step)})
        log.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_tensorboard_reads_the_same_values(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tb")
    for step in (1, 2, 3):
        log.write(step, {"reward": step / 4})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_tensorboard_drops_the_steps_that_a_resumed_run_takes_again(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with closing(MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tb")) as log:
        for step in range(4):
            log.write(step, {"reward": 0.25})
        log.rewind(1)
        log.write(2, {"reward": 0.5})
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(0, 0.25), (1, 0.25), (2, 0.5)]


def test_shares_of_lags_are_histograms_in_tensorboard(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shares = {"staleness/lag_1": 0.25, "staleness/lag_3": 0.75, "staleness/in_queue_0": 1.0}
    log = MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tb", builtin_metrics())
    log.write(4, {**shares, "staleness/in_queue": 0.5, "score/top_5": 2.0})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["score/top_5", "staleness/in_queue"]
    assert sorted(events.Tags()["histograms"]) == ["staleness/in_queue_histogram", "staleness/lag_histogram"]
    (event,) = events.Histograms("staleness/lag_histogram")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num, found.sum) == (4, 0.5, 3.5, 1.0, 2.5)
    assert (found.bucket_limit, found.bucket) == ([1.5, 2.5, 3.5], [0.25, 0.0, 0.75])
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["staleness/lag_3"] == 0.75


def test_a_run_directory_and_latest(tmp_path: Path):
    runs = [RunDirectory.create(tmp_path, "grpo", "steps: 3\n", "{}\n") for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs[:2]:
        run.link_latest()
    assert os.readlink(tmp_path / "grpo" / "latest") == runs[1].path.name
    for run in runs:
        assert run.tensorboard.is_dir()
        assert run.checkpoints.is_dir()
    assert sorted(p.name for p in (tmp_path / "grpo").iterdir() if not p.is_dir() or p.is_symlink()) == [
        "latest"
    ]


def test_the_files_of_a_run(tmp_path: Path):
    run = RunDirectory.create(tmp_path, "grpo", "steps: 3\n", "{}\n")
    files = [run.config, run.plan, run.metrics, run.trace, run.summary, run.activity]
    assert [f.name for f in files] == [
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "trace.json",
        "summary.json",
        "activity.json",
    ]
    assert {f.parent for f in files} == {run.path}
    directories = (run.samples, run.sample_log, run.weights, run.checkpoints, run.tensorboard)
    assert len(set(directories)) == len(directories), "some are removed when the run ends"
    run.write_summary({"steps": 3})
    assert json.loads(run.summary.read_text()) == {"steps": 3}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("agent/agent.tool_calls", "agent/tool_calls"),
        ("agent/agent.judge.score", "agent/judge.score"),
        ("agent/rubric.clear", "agent/rubric.clear"),
        ("agent/agent.reward", "agent/agent.reward"),  # a field
        ("agent/agent.reward_std", "agent/agent.reward_std"),  # a metric of hflow
        ("agent/agent", "agent/agent"),
    ],
)
def test_metrics_of_a_generate_node_do_not_repeat_its_name(name: str, shown: str) -> None:
    assert _shorten(name, {"agent/reward"}) == shown


def rows_of(path, *parts):
    """Write rows as several parts of a run, and return metric -> its values, as the lines have them."""
    for part in parts:
        with closing(MetricsLog(path, path.parent / "tb")) as log:
            for step in part:
                evaluated = {"eval/score": 1.0 / (step + 1)} if step % 7 == 0 else {}
                log.write(step, {"loss": step * 0.1, "rare": math.nan if step % 3 else 5, **evaluated})
    curves = defaultdict(dict)
    for row in read_metrics(path):
        for name in row.keys() - {"step"}:
            if row[name] is not None:
                curves[name][row["step"]] = row[name]
    return {name: sorted(values.items()) for name, values in sorted(curves.items())}


def listed(path):
    return {name: list(curve) for name, curve in read_curves(path).items()}


def test_columns_have_what_the_lines_have(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = rows_of(path, range(1, 151), range(120, 333), range(333, 340))
    assert listed(path) == rows
    columns = path.with_suffix(".columns")
    assert len(list(_blocks(path, path.open("rb")))) == (150 + 213 + 7) // BLOCK_ROWS
    data = columns.read_bytes()
    for changed in (
        data[:-5],
        data[: len(data) // 2] + b"!" + data[len(data) // 2 + 1 :],
        b"",
        b"{}\n",
        b"7\n\n",
    ):
        columns.write_bytes(changed)
        assert listed(path) == rows
        rows_of(path, [])
        assert columns.read_bytes() == data, "a run that continues writes again what is damaged"
    assert list(read_curves(path)["loss"][-2:]) == [(338, 33.800000000000004), (339, 33.9)]


def test_columns_of_other_lines_are_not_used(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows_of(path, range(1, 250))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:130]))
    rows = rows_of(path, range(131, 310))
    assert listed(path) == rows
    path.write_text("".join(lines[:110]).replace('"loss": 0.1,', '"loss": 0.2,'))
    assert read_curves(path)["loss"][0] == (1, 0.2)
    path.write_text("".join([*lines[:149], "{}\n", *lines[150:]]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:150 is not a row"):
        read_curves(path)
