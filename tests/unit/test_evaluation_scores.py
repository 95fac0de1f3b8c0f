"""The scores of an evaluation: refused samples neither raise pass@k for small k nor hide a stream."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from ledger_kit import LedgerScript
from rich.console import Console
from state_script import grpo

from hflow.algo.pass_at_k import pass_at_k
from hflow.launch.checkpoints.evaluate import EvaluationReport
from hflow.report.text.results import render_evaluation
from hflow.runtime import events as ev
from hflow.runtime.ledger import Ledger
from hflow.runtime.ledger.header import schedule_header
from hflow.runtime.ledger.scores import StreamScores, read_scores


def scores_of(path: Path, values: Mapping[int, float | None], *pass_at: int) -> StreamScores:
    """Return the scores of an evaluation of two samples per prompt; None: the sample was refused."""
    header = schedule_header(grpo(shared=False))
    (stream,) = header.streams
    nodes = (header.nodes[0], replace(header.nodes[1], field="reward"), *header.nodes[2:])
    evaluated = replace(stream, judge="score", dataset="heldout", is_trained=False)
    with Ledger(path, replace(header, streams=(evaluated,), nodes=nodes)) as ledger:
        run = LedgerScript(ledger)
        for group in range(len(values) // 2):
            run.issue(group)
        scored = []
        for sample, value in values.items():
            run.ready(sample, (0, 4))
            if value is None:
                run.refuse(sample, node="score", reason=ev.Refusal.FAILED, message="ValueError: no")
            else:
                run.score(sample, value)
                scored.append(sample)
        if scored:
            ledger.record_instruction(ev.FormBatch("gen", 0, tuple(scored), tuple({s // 2 for s in scored})))
    (scores,) = read_scores(path, pass_at_k, 0.7, pass_at)
    return scores


def shown(tmp_path: Path, scores: StreamScores) -> str:
    report = EvaluationReport("r.py", {"actor": "path"}, 1, str(tmp_path), 0.7, (scores,), {})
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render_evaluation(report))
    return console.export_text()


def test_pass_at_k_averages_over_the_same_prompts_for_every_k(tmp_path: Path) -> None:
    """One prompt is wrong twice, the other right once and refused once: pass@1 was 1/2 and pass@2 0."""
    scores = scores_of(tmp_path / "ledger.sqlite", {0: 0.0, 1: 0.0, 2: 0.7, 3: None})
    (field,) = scores.fields
    assert (scores.num_prompts, scores.num_samples, scores.num_refused) == (2, 3, 1)
    assert (field.mean, field.num_prompts) == (pytest.approx(0.35), 2)
    assert (field.pass_at, field.pass_at_prompts) == ({1: 0.0, 2: 0.0}, 1)
    assert "gen/reward: pass@k over the 1 of 2 prompts with 2 scored samples or more" in shown(
        tmp_path, scores
    )


def test_all_prompts_count_where_nothing_was_refused(tmp_path: Path) -> None:
    scores = scores_of(tmp_path / "ledger.sqlite", {0: 0.0, 1: 0.0, 2: 0.7, 3: 0.0})
    (field,) = scores.fields
    assert (field.pass_at, field.pass_at_prompts) == ({1: 0.25, 2: 0.5}, 2)
    assert "prompts with" not in shown(tmp_path, scores)


def test_a_k_that_no_prompt_has_samples_for_is_left_out(tmp_path: Path) -> None:
    scores = scores_of(tmp_path / "ledger.sqlite", {0: 0.0, 1: None, 2: 0.7, 3: None})
    (field,) = scores.fields
    assert (field.pass_at, field.pass_at_prompts) == ({1: 0.5}, 2)
    scores = scores_of(tmp_path / "asked.sqlite", {0: 0.0, 1: None, 2: 0.7, 3: None}, 2)
    assert scores.fields[0].pass_at == {}
    assert "gen/reward: no pass@k, as no prompt has as many scored samples" in shown(tmp_path, scores)


def test_a_stream_with_refusals_only_is_shown(tmp_path: Path) -> None:
    scores = scores_of(tmp_path / "ledger.sqlite", dict.fromkeys(range(4)))
    assert (scores.num_prompts, scores.num_samples, scores.num_refused, scores.fields) == (0, 0, 4, ())
    text = shown(tmp_path, scores)
    row = next(line for line in text.splitlines() if line.startswith("gen "))
    assert row.split() == ["gen", "0", "0", "4", "none"]
    assert "gen: all of its samples were refused" in text
