"""`hflow report`: what it reads of a run, its text, and its page as text; runs that lack files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from command_line import CommandLine
from run_files import DONE, EVIL, reward_rows, write_full_run, write_run
from test_page import Page

from hflow.base.errors import ConfigError
from hflow.launch.results.runs import RunReport, read_report
from hflow.report.formatting import thinned
from hflow.report.html.run import render_run_page
from hflow.report.html.run.curves import HEIGHT, MARGIN, WIDTH, Series, curve_groups, curve_view
from hflow.report.html.run.view import measured_gantt, planned_gantt, run_page_view
from hflow.runtime.ledger.query import read_overview


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture(scope="module")
def report(run: Path) -> RunReport:
    return read_report(str(run))


def test_the_ledger_s_history_is_counted_without_what_was_done_again(run: Path, report: RunReport) -> None:
    assert report.ledger is not None
    assert report.ledger.ends == {"trained": 8, "refused": 2}
    (refused,) = report.ledger.refused
    assert (refused.node, refused.reason, refused.count) == ("score", "failed", 2)
    (back,) = report.ledger.rewinds
    assert (back.step, back.steps_lost) == (1, 1)
    assert [row["id"] for row in report.ledger.samples] == [0, 1, 6, 9], "those whose text was kept"
    assert [row["id"] for row in read_overview(run / "ledger.sqlite").samples] == list(range(10))


def test_the_measured_chart_is_two_steps_of_the_trace(report: RunReport) -> None:
    chart = measured_gantt(report.trace.spans)
    assert chart is not None
    assert chart.period == "1 s"
    lanes = [lane for lane in chart.lanes if lane.name == "worker 1"]
    assert [lane.note for lane in lanes] == ["generate", "device"]
    assert [(bar.step, round(bar.left), round(bar.width)) for bar in lanes[1].bars] == [
        ("4", 30, 20),
        ("5", 80, 20),
    ], "from the end of step 3 to the end of step 5, two seconds"
    assert lanes[1].idle == "60 %"
    assert measured_gantt(report.trace.spans[:2]) is None


def test_the_trace_of_an_older_run_counts_steps_from_0(run: Path, tmp_path: Path, report: RunReport) -> None:
    older = Path(shutil.copytree(run, tmp_path / "older"))
    trace = json.loads((older / "trace.json").read_text())
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["cat"] == "device":
            event["args"]["step"] -= 1
    (older / "trace.json").write_text(json.dumps(trace))
    spans = read_report(str(older)).trace.spans
    assert [span for span in spans if span.lane == "device"] == [
        s for s in report.trace.spans if s.lane == "device"
    ]


def test_the_planned_chart_is_that_of_the_plan(report: RunReport) -> None:
    chart = planned_gantt(report.record.plan)
    assert chart is not None
    assert {bar.node for lane in chart.lanes for bar in lane.bars} >= {"actor_gen", "actor_train"}
    assert planned_gantt({"forecast": None}) is None
    assert planned_gantt({"forecast": {"period": {"seconds": 1}}}) is None, "of another version"


def test_a_curve_spans_the_run_and_its_values() -> None:
    short = Series(((0, 4.0), (5, 2.0), (10, 3.0)), "3")
    longer = Series(((20, 6.0),), "6")
    middle = HEIGHT / 2
    curve = curve_view("loss", [short], 10)
    assert (curve.low, curve.high) == ("2", "4")
    assert curve.lines[0].dots == ((0, MARGIN), (WIDTH / 2, HEIGHT - MARGIN), (WIDTH, middle))
    assert curve_view("flat", [Series(((1, 0.5), (2, 0.5)), "0.5")], 2).lines[0].dots[0][1] == middle
    both = curve_view("loss", [short, longer], 20)
    assert (both.low, both.high, both.last_step) == ("2", "6", "20"), "all curves of a plot share its axes"
    assert [line.dots[0] for line in both.lines] == [(0, middle), (WIDTH, MARGIN)]
    long = [(step, float(step)) for step in range(1000)]
    thin = list(thinned(long, 100))
    assert len(thin) == 100
    assert thin[-1] == (999, 994.5)


def test_the_page_is_self_contained_and_names_are_only_text(report: RunReport) -> None:
    text = render_run_page(report)
    page = Page(text)
    assert [at for at in page.addresses if not at.startswith("#") and at != "data:,"] == []
    assert {at[1:] for at in page.addresses if at.startswith("#")} <= set(page.ids)
    assert re.findall(r"https?://(?!www\.w3\.org)", text) == []
    assert "@import" not in text
    assert "img" not in page.tags
    assert EVIL in page.text
    assert len(page.ids) == len(set(page.ids))


def test_staleness_that_is_0_throughout_is_not_drawn() -> None:
    zero, shares = ((1, 0.0), (2, 0.0)), ((1, 1.0), (2, 1.0))
    curves = {"staleness/max": zero, "staleness/lag_0": shares, "time/step_seconds": ((1, 0.4), (2, 0.0))}
    groups, others = curve_groups(curves, (), (), {})
    assert [title for title, _ in groups] == ["Speed"]
    assert others == ()
    groups, others = curve_groups({**curves, "staleness/max": ((1, 0.0), (2, 1.0))}, (), (), {})
    assert [title for title, _ in groups] == ["Staleness", "Speed"]
    assert [curve.name for curve in others] == ["staleness/lag_0"]


def test_the_number_beside_a_curve_is_the_final_value_of_the_other_tables() -> None:
    rising = tuple((step, float(step)) for step in range(20))
    groups, _ = curve_groups({"gen/reward": rising}, ["gen/reward"], (), {})
    assert groups[0][1][0].lines[0].final == "18.5", "the mean of 18 and 19"


def test_the_page_has_every_curve_once(report: RunReport) -> None:
    view = run_page_view(report)
    shown = [curve.name for _, members in view.groups for curve in members]
    names = [*shown, *(curve.name for curve in view.others)]
    assert sorted(names) == sorted(report.record.curves)
    assert [title for title, _ in view.groups] == ["Results", "Policy", "Staleness", "Speed"]
    assert shown[:2] == ["actor_gen/reward", "actor_train/loss"]
    assert [curve.name for curve in view.others] == ["rollout/accepted"]
    assert view.colours == ("reward", "advantage", "log-prob", "version", "lag")


def test_samples_have_their_texts_token_by_token(report: RunReport) -> None:
    sample = next(sample for sample in run_page_view(report).samples if sample.name == "gen/9")
    asked, answered = sample.texts
    assert (asked.role, asked.is_trained, asked.tokens) == ("user", False, ())
    assert [token[0] for token in answered.tokens] == ["4", "2", "<eos>"]
    assert sample.numbers["log-prob"] == pytest.approx((-1.0 - 2.0 - 0.5) / 3)
    assert sample.numbers["advantage"] == 5.0
    assert sample.numbers["version"] == 1


def test_the_command_prints_and_writes(run: Path, tmp_path: Path, hflow: CommandLine) -> None:
    out = hflow.prints("report", str(run))
    assert "done after 20 steps" in out
    assert "went back to the checkpoint of step 1; 1 step done again" in out
    assert "a step takes 1 s, planned" in out
    row = next(line for line in out.splitlines() if line.startswith("failed"))
    assert row.split()[:3] == ["failed", "2", "score"]
    file = tmp_path / "report.html"
    hflow.prints("report", str(run), "--html", str(file))
    assert file.read_text().startswith("<!doctype html>")
    assert "cannot write" in hflow.refused("report", str(run), "--html", str(tmp_path / "no" / "file"))


def test_a_run_without_trace_ledger_and_forecast_has_a_page_that_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", reward_rows(0.1, 0.2))
    text = Page(render_run_page(read_report(str(run)))).text
    assert "The run has no trace" in text
    assert "The plan has no estimate of a step" in text
    assert "The run has no ledger of samples" in text
    assert "Failed or killed after 2 of 20 steps" in text


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", reward_rows(0.1), DONE)
    for content in ("no json", '{"traceEvents": [{"ph": "X"}]}', "[]"):
        (run / "trace.json").write_text(content)
        with pytest.raises(ConfigError, match=r"trace\.json is not"):
            read_report(str(run))
    (run / "trace.json").unlink()
    (run / "ledger.sqlite").write_text("no database")
    with pytest.raises(ConfigError, match="is not a ledger of hflow"):
        read_report(str(run))
    (run / "ledger.sqlite").unlink()
    (run / "samples").mkdir()
    row = {"root": "gen", "id": 3, "values": {}, "turns": [{"role": "user", "text": "a", "trained": 0}]}
    for damage in ({"turns": [{}]}, {"values": []}, {"turns": [{**row["turns"][0], "tokens": [["a", 1]]}]}):
        (run / "samples" / "step-1.jsonl").write_text(json.dumps({**row, **damage}) + "\n")
        with pytest.raises(ConfigError, match="has a damaged row of sample 3"):
            read_report(str(run))
    (run / "samples" / "step-1.jsonl").unlink()
    (run / "summary.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match="is not a summary of a run"):
        read_report(str(run))
    with pytest.raises(ConfigError, match="there is no run"):
        read_report(str(tmp_path / "none"))
