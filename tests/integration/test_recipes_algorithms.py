"""Every shipped recipe but sft and grpo runs, and what each promises of its first steps holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from runs import ROOT, largest_difference, run, steps_of, weights_of
from safetensors.torch import load_file

from hflow.base.errors import NotYetError

ALONE = ["workers=inproc", "cluster=cpu-1x1"]
HERE = ROOT / "tests" / "integration" / "recipes"
ACTOR = ["models.actor.path=null", "models.actor.optim.warmup_steps=0", "models.actor.optim.lr=1e-3"]
SMALL = ["steps=2", "batch=8", "data.heldout.limit=6", "save_every=1", "keep_checkpoints=null"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Additions whose right answer is none at all, which random weights give now and then."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [
        {
            "prompt": f"{a:02d}+{a:02d}=",
            "messages": [{"role": "user", "content": f"{a:02d}+{a:02d}"}],
            "answer": "",
        }
        for a in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return ["data.train.generator=null", f"data.train.path={path}"]


@pytest.mark.first(2)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cispo", []),
        ("dapo", []),
        ("distill", ["models.teacher.path=null", "models.teacher.dtype=bf16"]),
        pytest.param("dr_grpo", [], marks=pytest.mark.long),
        ("grpo_chat", ["data.train.map.prompt=messages"]),
        pytest.param("gspo", [], marks=pytest.mark.long),
        ("mis", ["placement=null"]),
        (
            "opd",
            ["placement=null", "models.teacher.path=null", "models.teacher.architecture.num_hidden_layers=3"],
        ),
        ("teachers", ["models.low.path=null", "models.high.path=null"]),
        pytest.param("reinforce_pp", ["batch=64"], marks=pytest.mark.long),
        ("remax", ["batch=64"]),
        pytest.param("rloo", [], marks=pytest.mark.long),
    ],
)
def test_a_recipe_of_answers_learns(name: str, changes: list[str], rows: list[str], tmp_path: Path) -> None:
    summary = run(f"recipes/{name}.py", tmp_path, *ALONE, *ACTOR, *SMALL, *rows, *changes)
    assert (summary.reason, summary.steps) == ("done", 2)
    for row in steps_of(summary):
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
    first, second = (
        load_file(summary.directory / "checkpoints" / f"step-{k}" / "actor" / "model.safetensors")
        for k in (1, 2)
    )
    assert largest_difference(first, second) > 1e-5


IN_GRPO = {
    "vespo": {"nodes.actor_train": "nodes.vespo_train"},
    "high entropy": {"nodes.actor_train": "nodes.high_entropy_train"},
    "optimal token baseline": {
        "nodes.group_advantage": "use(nodes.logit_gradient_inf, actor, k=4), nodes.optimal_token_advantage"
    },
    "roles": {"nodes.group_advantage": 'use(nodes.role_advantage, reads={"role": "answer"})'},
    "adaptive entropy": {
        "score,\n": "score, use(nodes.entropy_inf, actor), nodes.adaptive_entropy,\n",
    },
    "hierarchy": {
        "nodes.group_advantage": "token_reward, nodes.hierarchical_advantage",
        "recipe = Recipe(": "@compute()\ndef token_reward(reward: PerSequence, seqs: Sequences)"
        " -> PerToken:\n    return seqs.at_end(reward)\n\n\nrecipe = Recipe(",
        "from hflow import ": "from hflow import PerSequence, PerToken, Sequences, ",
    },
    "resampled": {
        "score,\n": "score, nodes.resample,\n",
        'prox="none"': 'prox="none", mask="draws"',
    },
    "best and worst": {
        "score,\n": "score, use(nodes.best_worst_mask, best=2),\n",
        'prox="none"': 'prox="none", mask="is_kept"',
    },
    "maxrl": {"nodes.group_advantage": "nodes.maxrl_advantage"},
    "best": {"nodes.group_advantage": "nodes.best_advantage"},
}
"""What takes the place of a node of `recipes/grpo.py`."""


@pytest.mark.first(6)
@pytest.mark.parametrize("name", IN_GRPO)
def test_a_node_takes_the_place_of_another(name: str, rows: list[str], tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "grpo.py").read_text()
    for old, new in IN_GRPO[name].items():
        assert old in text
        text = text.replace(old, new)
    recipe = tmp_path / "grpo.py"
    recipe.write_text(text)
    (tmp_path / "grpo.yaml").write_text((ROOT / "recipes" / "grpo.yaml").read_text())
    summary = run(recipe, tmp_path / "runs", *ALONE, *ACTOR, *SMALL, *rows)
    for row in steps_of(summary):
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
    assert max(row[key] for row in steps_of(summary) for key in row if key.endswith("/grad_norm")) > 0


def test_kto_learns_from_single_answers(tmp_path: Path) -> None:
    options = ["steps=20", "batch=64", "data.heldout.limit=6", "models.actor.optim.lr=1e-4"]
    options += ["models.actor.optim.warmup_steps=0", "models.actor.optim.schedule=constant"]
    rows = steps_of(run("recipes/kto.py", tmp_path, *ALONE, *options))
    assert rows[0]["kto/loss"] == pytest.approx(0.5)  # sigmoid(0) of both kinds
    assert rows[0]["kto/reference_point"] == 0
    assert sum(row["kto/loss"] for row in rows[-10:]) / 10 < 0.46
    assert sum(row["kto/accuracy"] for row in rows[-10:]) / 10 > 0.5


def test_dapo_trains_on_groups_with_a_spread_only(rows: list[str], tmp_path: Path) -> None:
    summary = run("recipes/dapo.py", tmp_path, *ALONE, *ACTOR, *SMALL, *rows)
    rows_of_steps = steps_of(summary)
    assert sum(row.get("refused/keep", 0) for row in rows_of_steps) > 0
    for row in rows_of_steps:
        assert row["batch/samples"] == 64
        # Every group of eight has at least one right and one wrong answer; the reward is 2 right - 1.
        assert 1 / 8 <= row["actor_gen/right"] <= 7 / 8
        assert row["actor_gen/keep"] == 1


@pytest.mark.long
def test_preferences_are_learned(tmp_path: Path) -> None:
    common = [*ALONE, "steps=20", "batch=32", "data.heldout.limit=20"]
    rm = ["models.rm.path=null", "models.rm.optim.warmup_steps=0", "nodes.eval_pair.every=20"]
    scored = run("recipes/reward_model.py", tmp_path, *common, *rm)
    dpo = run("recipes/dpo.py", tmp_path, *common, *ACTOR, "nodes.eval_gen.after=1000")
    for summary, node in ((scored, "reward_train"), (dpo, "dpo")):
        rows = steps_of(summary)
        # Indifferent at first (log 2), then the chosen are told from the rejected.
        assert rows[0][f"{node}/loss"] == pytest.approx(math.log(2), abs=0.1)
        assert rows[-1][f"{node}/loss"] < rows[0][f"{node}/loss"] - 0.01
        assert sum(row[f"{node}/accuracy"] for row in rows[-5:]) / 5 > 0.5
    held = [json.loads(line) for line in (scored.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in held if "eval_pair/accuracy" in row] == [0, 20]


def test_ppo_with_the_reward_of_a_model(tmp_path: Path) -> None:
    options = ["models.rm.path=null", "steps=2", "batch=16"]
    scored = run("recipes/reward_model.py", tmp_path, *ALONE, *options, "nodes.eval_pair.after=1000")
    rm = (scored.directory / "checkpoints" / "latest" / "rm").resolve()
    models = [f"+model@models.{name}=tiny-qwen2" for name in ("actor", "rm")]
    ppo = run(
        HERE / "ppo_of_a_reward_model.py",
        tmp_path,
        *ALONE,
        *models,
        f"models.rm.path={rm}",
        "+data@data.train=addition",
        "models.actor.optim.lr=1e-3",
        "models.critic.optim.lr=1e-3",
        "steps=3",
        "batch=8",
    )
    for row in steps_of(ppo):
        assert [key for key, value in row.items() if not math.isfinite(value)] == []
        assert row["actor_train/grad_norm"] > 0
        assert row["critic_train/grad_norm"] > 0


def test_the_kl_moves_from_the_reward_into_the_loss(tmp_path: Path) -> None:
    common = [*ALONE, *ACTOR, *SMALL, "nodes.actor_train.after=0", "models.critic.optim.warmup_steps=0"]
    paid = run("recipes/ppo.py", tmp_path / "paid", *common)
    moved = ["nodes.kl_reward.beta=0", "nodes.actor_train.kl_coef=0.05", "nodes.actor_train.kl_estimator=k2"]
    lost = run("recipes/ppo.py", tmp_path / "lost", *common, *moved)
    assert [row["kl_reward/beta"] for row in steps_of(lost)] == [0, 0]
    for found in (paid, lost):
        kls = [row["actor_train/ref_kl"] for row in steps_of(found)]
        assert 0 <= kls[0] < kls[1]
    assert largest_difference(weights_of(paid), weights_of(lost)) > 1e-5


def test_a_critic_can_warm_up_alone(tmp_path: Path) -> None:
    options = [
        *ALONE,
        *ACTOR,
        "steps=3",
        "batch=8",
        "data.heldout.limit=6",
        "save_every=1",
        "keep_checkpoints=null",
    ]
    summary = run("recipes/ppo.py", tmp_path, *options, "nodes.actor_train.after=2")
    rows = steps_of(summary)
    assert ["actor_train/loss" in row for row in rows] == [False, False, True]
    assert all("critic_train/loss" in row for row in rows)
    first, second, third = (
        load_file(summary.directory / "checkpoints" / f"step-{k}" / "actor" / "model.safetensors")
        for k in (1, 2, 3)
    )
    assert largest_difference(first, second) == 0 < largest_difference(second, third)


BESIDE = ["+model@models.actor=tiny-qwen2", "+data@data.train=addition", "models.actor.optim.lr=1e-3"]
# A large eps: gradients that are zero but for rounding (key biases) must not become steps.
BESIDE += ["models.actor.optim.eps=1e-3"]
BESIDE += ["steps=3", "batch=8", "schedule.max_concurrent=64"]


def test_each_sample_has_a_greedy_baseline(tmp_path: Path) -> None:
    """Refused groups release what is drawn beside them; two workers compute what one process does."""
    alone = run(HERE / "greedy_beside.py", tmp_path / "alone", *ALONE, *BESIDE)
    options = [*BESIDE, "workers=inproc", "cluster=cpu-1x2"]
    apart = run(HERE / "greedy_beside.py", tmp_path / "apart", *options)
    for ours, theirs in zip(steps_of(alone), steps_of(apart), strict=True):
        assert ours["greedy/baseline"] == theirs["greedy/baseline"]
        assert ours["actor_gen/reward"] == theirs["actor_gen/reward"]
    assert largest_difference(weights_of(alone), weights_of(apart)) < 1e-5


def test_unsupported_uses_of_derived_samples(tmp_path: Path) -> None:
    source = (HERE / "greedy_beside.py").read_text()
    recipe = tmp_path / "other.py"
    recipe.write_text(
        source.replace("temperature=0.0, ", "").replace('prox="none"', 'prox="none", on="greedy"')
    )
    with pytest.raises(NotYetError, match=r"greedy .*: actor_train trains on this derived stream"):
        run(recipe, tmp_path / "runs", *ALONE, *BESIDE)
    recipe.write_text(
        source.replace("recipe = Recipe", 'other = Model("other")\nrecipe = Recipe').replace(
            'use(nodes.actor_gen, actor, name="greedy"', 'use(nodes.actor_gen, other, name="greedy"'
        )
    )
    with pytest.raises(NotYetError, match=r"greedy .* derives from stream 'actor_gen', so it can only use"):
        run(recipe, tmp_path / "runs", *ALONE, *BESIDE, "+model@models.other=tiny-qwen2")
