"""Directories of runs as hflow writes them, without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    file = {"format": 1, "recipe": "small.py", "config": values, "plan": {"graph": {"nodes": NODES}}}
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
