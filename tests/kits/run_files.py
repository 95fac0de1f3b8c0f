"""Directories of runs as hflow writes them, without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_samples import with_forecast
from ledger_kit import recorded
from plan_graphs import grpo, request

from hflow.planner.compile import compile_plan
from hflow.planner.plan.serialise import to_json
from hflow.runtime.events import Refusal
from hflow.runtime.ledger import rewind
from hflow.runtime.records.sample_text_files import write_samples
from hflow.runtime.records.trace import CONTROLLER, Trace
from hflow.workers.interface import Span

NODES = [
    {"stream": "gen", "spec": {"name": "gen", "verb": "generate", "returns": []}},
    {"stream": "gen", "spec": {"name": "score", "verb": "compute", "returns": [{"field": "reward"}]}},
    {"stream": "gen", "spec": {"name": "learn", "verb": "train", "returns": [{"field": "loss"}]}},
]
CONFIG = {"name": "small", "seed": 0, "steps": 20, "out": "runs", "models": {"actor": {"lr": 0.1}}}


def write_run(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write the files of a run that `hflow compare` reads; return its directory."""
    path.mkdir(parents=True)
    values = {**CONFIG, **config}
    file = {"format": 2, "recipe": "small.py", "config": values, "plan": {"graph": {"nodes": NODES}}}
    (path / "plan.json").write_text(json.dumps(file))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def reward_rows(*rewards: float | None) -> list[dict[str, float | None]]:
    """Rows of a run whose steps have these rewards, and losses that fall."""
    return [
        {"step": step, "gen/reward": reward, "learn/loss": 1 / step} for step, reward in enumerate(rewards, 1)
    ]


DONE = {"reason": "done", "steps": 20}


EVIL = "</script><img src=x onerror=alert(1)>"


def write_full_run(path: Path, num_steps: int = 6) -> Path:
    """Write a run with everything that `hflow report` reads: refusals, a rewind, a trace, a forecast."""
    plan = with_forecast(compile_plan(grpo(), request()))
    rows = [
        {
            "step": step,
            "actor_gen/reward": 0.1 * step,
            "actor_train/loss": 1.0 / step,
            "actor_train/kl": 0.01 * step,
            "actor_train/entropy": 2.0 - 0.1 * step,
            "staleness/mean": 0.5,
            "staleness/max": 2.0,
            "time/step_seconds": 1.0,
            "time/samples_per_second": 8.0,
            "rollout/accepted": 4.0 * step,
        }
        for step in range(1, num_steps + 1)
    ]
    write_run(path, rows, {**DONE, "warnings": [f"worker 1 died {EVIL}"]})
    file = json.loads((path / "plan.json").read_text())
    (path / "plan.json").write_text(json.dumps({**file, "plan": to_json(plan)}))
    trace = Trace()
    for step in range(num_steps):
        for worker in (0, 1):
            trace.add(worker, Span("generate actor@gen", "generate", step, step + 0.4, {"version": step}))
            trace.add(worker, Span("actor_train", "device", step + 0.5, step + 0.9, {"step": step + 1}))
    trace.add(CONTROLLER, Span("restart", "faults", 2.9, 2.95, {"step": 1}))
    trace.write(path / "trace.json")
    ledger = path / "ledger.sqlite"
    with recorded(ledger) as script:
        script.train(0, 0, 1)
        script.issue(2)
        for sample in script.members(2):
            script.ready(sample, (1, 4))
        script.refuse(4, 5, node="score", reason=Refusal.FAILED, message=f"no number {EVIL}")
        position = script.ledger.position()
        script.train(1, 3, 4, version=1)
    rewind(ledger, 1, position)
    with recorded(ledger) as script:
        script.train(1, 3, 4, version=1)
        script.ledger.close("done")
    for sample in (0, 1, 6, 9):
        write_samples(path / "samples", 1 + sample // 6, [_text_row(sample)])
    return path


def _text_row(sample: int) -> dict[str, Any]:
    version = sample // 6
    tokens = [("4", -0.1 * (1 + sample), version), ("2", -2.0, version), ("<eos>", -0.5, version)]
    turns = [
        {"role": "user", "text": f"17+25={EVIL}", "trained": False},
        {"role": "assistant", "text": "42<eos>", "trained": True, "tokens": tokens},
    ]
    values = {"reward": 1.0, "advantages": sample - 4.0}
    return {
        "root": "gen",
        "stream": f"gen{sample}",
        "id": sample,
        "step": version,
        "turns": turns,
        "values": values,
    }
