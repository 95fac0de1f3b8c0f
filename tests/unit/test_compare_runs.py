"""`hflow compare`: which runs are one side, what differs between sides, what metrics reached; bad input."""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path

import pytest
from command_line import CommandLine
from run_files import DONE, reward_rows, write_run

from hflow.base.errors import ConfigError
from hflow.launch.results.compare import compare
from hflow.launch.results.runs import read_run
from hflow.report.formatting import ends_of, thinned
from hflow.report.html.run.compare_view import compare_page_view


def test_seeds_of_one_configuration_are_one_side(tmp_path: Path) -> None:
    rewards = {0: 0.4, 1: 0.6}
    seeds = [
        write_run(tmp_path / f"a{seed}", reward_rows(0.1, last), DONE, seed=seed, out=f"x{seed}")
        for seed, last in rewards.items()
    ]
    other = write_run(tmp_path / "b", reward_rows(0.9, 0.2), DONE, models={"actor": {"lr": 0.2}})
    comparison = compare([str(path) for path in (*seeds, other)])
    assert [side.seeds for side in comparison.sides] == [(0, 1), (0,)]
    assert comparison.config == (("models.actor.lr", ("0.1", "0.2")),)
    reward = next(metric for metric in comparison.metrics if metric.name == "gen/reward")
    both, single = reward.values
    assert both is not None
    assert single is not None
    assert both.final.mean == pytest.approx(0.5)
    assert both.final.deviation == pytest.approx(math.sqrt(0.02)), "the sample standard deviation"
    assert both.curve == ((1, 0.1), (2, pytest.approx(0.5)))
    assert (single.best.mean, single.best_step, single.final.mean) == (0.9, 1, 0.2)
    loss = next(metric for metric in comparison.metrics if metric.name == "learn/loss")
    assert loss.values[1] is not None
    assert loss.values[1].best.mean == 0.5, "the lowest loss is the best"


def test_the_final_value_is_the_mean_of_the_last_tenth() -> None:
    assert ends_of(tuple((step, float(step)) for step in range(1, 31)))[1] == 29
    assert ends_of(((5, 0.25),))[1] == 0.25


def test_a_thinned_curve_keeps_the_mean_and_the_last_step() -> None:
    curve = tuple((step, float(step)) for step in range(100))
    thin = thinned(curve, 10)
    assert len(thin) == 10
    assert thin[-1] == (99, 94.5)
    assert sum(value for _, value in thin) / 10 == pytest.approx(49.5)


def test_the_later_row_of_a_step_counts_and_an_unfinished_line_does_not(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [*reward_rows(0.1, 0.2), *reward_rows(0.1, None)[1:]])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "gen/reward": 0.7}\n{"step": 3, "gen/rew')
    record = read_run(str(run))
    assert tuple(record.curves["gen/reward"]) == ((1, 0.1), (2, 0.7))
    assert record.state == "failed or killed after 2 of 20 steps"


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", reward_rows(0.1, 0.2), DONE)  # a summary of the part before a resume
    (run / "error.txt").write_text("disk is full\n")
    record = read_run(str(run))
    assert record.state == "failed after 2 of 20 steps: disk is full"
    assert record.summary is None
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="has no metrics yet; it failed: disk is full; name another run"):
        read_run(str(run))


def test_a_run_that_is_still_going_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", reward_rows(0.1), DONE)  # the summary is of the part before a resume
    with (run / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(str(run)).state == "still going, 1 of 20 steps"
    assert read_run(str(run)).state == "done after 20 steps"


def test_the_command_prints_tables_and_json(tmp_path: Path, hflow: CommandLine) -> None:
    a = write_run(tmp_path / "a", reward_rows(0.1, 0.4), DONE)
    b = write_run(tmp_path / "b", reward_rows(0.1, 0.8), name="other", batch=4)
    out = hflow.prints("compare", str(a), str(b))
    assert "A  small, seed 0" in out
    assert "B  other, seed 0" in out
    assert "failed or killed after 2 of 20 steps" in out
    row = next(line for line in out.splitlines() if line.startswith("gen/reward"))
    assert row.split() == ["gen/reward", "A", "0.4", "0.4", "2", "▁█"]
    values = json.loads(hflow.prints("compare", str(a), str(b), "--json", "--metric", "learn/*"))
    assert [metric["name"] for metric in values["metrics"]] == ["learn/loss"]
    assert values["config"] == [["batch", ["", "4"]]]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    good = str(write_run(tmp_path / "good", reward_rows(0.1)))
    empty = str(write_run(tmp_path / "empty", []))
    damaged = write_run(tmp_path / "damaged", reward_rows(0.1))
    (damaged / "metrics.jsonl").write_text('{"step": 1, "gen/reward": 0.5}\nno json\n')
    strange = write_run(tmp_path / "strange", reward_rows(0.1))
    (strange / "plan.json").write_text('{"plan": {"graph": {"nodes": [3]}}}')
    cases = {
        (good,): "needs two runs",
        (good, good): "is named twice",
        (good, str(tmp_path / "none")): "there is no run",
        (good, empty): "has no metrics yet; it ended before its first step",
        (good, str(damaged)): r"metrics.jsonl:2 is not a row of metrics",
        (good, str(strange)): "is not the plan of a run, or damaged",
    }
    for runs, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            compare(runs)
    other = str(write_run(tmp_path / "other", reward_rows(0.2)))
    with pytest.raises(ConfigError, match="did you mean 'gen/reward'"):
        compare([good, other], ["gen/rewrad"])


def test_the_page_has_every_curve_of_every_side(tmp_path: Path, hflow: CommandLine) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", reward_rows(0.1, 0.2), DONE, seed=seed)
    write_run(tmp_path / "b", [*reward_rows(0.1), {"step": 2, "gen/<b>": 1.0}], DONE, name="<i>", steps=2)
    runs = [str(tmp_path / name) for name in ("a0", "a1", "b")]
    view = compare_page_view(compare(runs, ("gen/*",)))
    assert [(side.letter, side.colour, side.seeds) for side in view.sides] == [
        ("A", 1, "2 runs, seeds 0, 1"),
        ("B", 2, "seed 0"),
    ]
    assert [[line.label for line in curve.lines] for curve in view.curves] == [["A", "B"], ["B"]]
    assert view.note, "the curve of two runs is their mean"
    assert view.config is not None
    assert view.config.rows == (("steps", "20", "2"),)
    assert view.values.rows[0] == ("gen/reward", "A", "0.2 ± 0", "0.2 ± 0", "2")
    file = tmp_path / "compare.html"
    out = hflow.prints("compare", *runs, "--metric", "gen/*", "--html", str(file))
    text = file.read_text()
    assert text.startswith("<!doctype html>")
    assert "<i>" not in text, "names of runs are only text"
    assert out.endswith("compare.html: page of small and <i>\n")
    assert "cannot write" in hflow.refused("compare", *runs, "--html", str(tmp_path / "no" / "file"))
