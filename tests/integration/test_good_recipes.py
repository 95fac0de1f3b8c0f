"""The recipes of `tests/graphs/good` that can run do run: their numbers are finite, their models learn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from runs import ROOT, run, steps_of, weights_of

from hflow.base.errors import NotYetError
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import model_settings
from hflow.models.settings import RankPosition
from hflow.training.fsdp.backend import TorchModel

GOOD = ROOT / "tests" / "graphs" / "good"
OWN_KINDS = ROOT / "tests" / "integration" / "recipes" / "own_kinds.py"
BASE = ["workers=inproc", "cluster=cpu-1x2", "steps=2", "batch=8", "+model@models.actor=tiny-qwen2"]
BASE += ["models.actor.optim.lr=1e-3"]
CRITIC = ["+model@models.critic=tiny-qwen2", "models.critic.optim.lr=1e-3"]
SHORT = ["nodes.actor_gen.max_tokens=2"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Additions. The right answer is none at all, which random weights give now and then."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    sums = [(a, 7 * a % 50) for a in range(40)]
    lines = [
        json.dumps(
            {"prompt": f"{a:02d}+{b:02d}=", "answer": "", "chosen": f"{a + b:03d}", "rejected": f"{a:03d}"}
        )
        for a, b in sums
    ]
    path.write_text("\n".join(lines))
    return path


RUNNABLE = {
    "dapo": ([*SHORT, "nodes.actor_gen.group=8", "nodes.actor_train.minibatches=2"], ["actor"]),
    "dpo": ([], ["actor"]),
    "ema": (SHORT, ["actor", "ref"]),
    "eval_gen": (
        [*SHORT, *CRITIC, "nodes.eval_gen.max_tokens=2", "data.heldout.limit=6"],
        ["actor", "critic"],
    ),
    "game": (
        [
            "~models.actor",
            "+model@models.alice=tiny-qwen2",
            "+model@models.bob=tiny-qwen2",
            "models.alice.optim.lr=1e-3",
            "models.bob.optim.lr=1e-3",
            "nodes.game.max_tokens=4",
        ],
        ["alice", "bob"],
    ),
    "gspo": (SHORT, ["actor"]),
    "own_kind": (SHORT, ["actor"]),
    "ppo": ([*SHORT, *CRITIC], ["actor", "critic"]),
    "sft": ([], ["actor"]),
    "tensor_dict": (SHORT, ["actor"]),
}


@pytest.mark.first(3)
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_good_recipe_runs_and_learns(name: str, rows: Path, tmp_path: Path) -> None:
    changes, trained = RUNNABLE[name]
    files = [f"data.train.path={rows}"] + ([f"data.heldout.path={rows}"] if name == "eval_gen" else [])
    overrides = [*BASE, *files, *changes]
    summary = run(GOOD / f"{name}.py", tmp_path, *overrides)
    steps = steps_of(summary)
    assert [row["step"] for row in steps] == [1, 2]
    assert summary.steps == 2
    for row in steps:
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
    settings = model_settings(compile_recipe(GOOD / f"{name}.py", overrides))
    for model in trained:
        before, after = (
            dict(TorchModel(settings[model], RankPosition()).weights()),
            weights_of(summary, model),
        )
        common = before.keys() & after.keys()
        assert common
        assert max(float((before[key] - after[key]).abs().max()) for key in common) > 1e-5


@pytest.mark.parametrize(
    ("name", "models", "reason"),
    [
        (
            "tool_agent",
            ["actor", "rm"],
            r"rew_inf .* runs as each group arrives, .* so rm@infer cannot share devices with actor@gen. "
            r"Give it devices of its own, as in placement='... rm=1'",
        ),
    ],
)
def test_unsupported_recipes_are_refused(
    name: str, models: list[str], reason: str, rows: Path, tmp_path: Path
) -> None:
    overrides = [f"+model@models.{model}=tiny-qwen2" for model in models]
    with pytest.raises(NotYetError, match=reason):
        run(GOOD / f"{name}.py", tmp_path, "workers=inproc", f"data.train.path={rows}", *overrides)
    assert list(tmp_path.iterdir()) == []


def test_custom_kinds_run_at_every_level(tmp_path: Path) -> None:
    """And per-sample and per-group bodies behind batch nodes, tensors per token among their inputs."""
    data = ["+data@data.train=addition", "nodes.centred.factor=3.0", "nodes.score.plus=1.0"]
    rule = compile_recipe(OWN_KINDS, [*BASE, *data]).plan.rule("total")
    assert rule.fields == tuple(
        f"actor_gen/{name}" for name in ("loss_mask", "num_tokens", "scaled", "weights")
    )
    summary = run(OWN_KINDS, tmp_path, *BASE, *data)
    for row in steps_of(summary):
        assert 1.0 <= row["actor_gen/reward"] < 2.0
        assert row["actor_gen/total"] == pytest.approx(0.0, abs=1e-5)
        assert row["actor_gen/advantages"] == pytest.approx(0.0, abs=1e-5)
        assert row["weights/looked"] == pytest.approx(0.5, abs=1e-3)
        assert row["weights/scaled"] == pytest.approx(3 * (1 + row["actor_gen/reward"]), rel=1e-5)
        assert row["actor_train/grad_norm"] > 0
