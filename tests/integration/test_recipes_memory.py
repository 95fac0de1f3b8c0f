"""What lasts from step to step besides trained weights: moving averages and the memory of nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import largest_difference, run, steps_of, weights_of
from safetensors.torch import load_file

from hflow.base.errors import NotYetError, RunError
from hflow.runtime.records.run_summary import RunSummary
from hflow.workers.ray.ray_actors import RayActors

EMA = "recipes/custom/ema_teacher.py"
SMALL = [
    "models.actor.path=null",
    "batch=8",
    "data.heldout.limit=6",
    "models.actor.optim.warmup_steps=0",
    "models.actor.optim.lr=1e-3",
]
EMA_OPTIONS = [*SMALL, "steps=4", "nodes.follow.decay=0.5", "nodes.actor_gen.group=2"]
EMA_OPTIONS += ["nodes.actor_train.entropy_coef=0.5", "nodes.actor_train.minibatches=1"]
"""Random weights are never right; by their entropy they learn all the same."""
PPO = "recipes/ppo.py"
PPO_OPTIONS = [*SMALL, "steps=5", "nodes.actor_train.after=0", "models.critic.optim.warmup_steps=0"]
PPO_OPTIONS += ["nodes.kl_reward.beta=0.5", "nodes.kl_reward.target=0.05", "nodes.kl_reward.horizon=80"]
ALONE = ["workers=inproc", "cluster=cpu-1x1"]


@pytest.fixture(scope="module")
def ema(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return run(
        EMA, tmp_path_factory.mktemp("ema"), *EMA_OPTIONS, *ALONE, "save_every=1", "keep_checkpoints=null"
    )


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    return run(PPO, tmp_path_factory.mktemp("ppo"), *PPO_OPTIONS, *ALONE)


def saved(summary: RunSummary, step: int, model: str) -> dict[str, torch.Tensor]:
    return load_file(summary.directory / "checkpoints" / f"step-{step}" / model / "model.safetensors")


def test_a_teacher_is_the_moving_average_of_the_weights_that_each_step_began_with(ema: RunSummary) -> None:
    # Update k reads what step k - 1 left: the first one averages two equal models.
    teacher = saved(ema, 1, "teacher")
    for step in (2, 3, 4):
        actor = saved(ema, step - 1, "actor")
        teacher = {name: 0.5 * weight + 0.5 * actor[name] for name, weight in teacher.items()}
        assert largest_difference(teacher, saved(ema, step, "teacher")) < 1e-6
    assert largest_difference(teacher, saved(ema, 4, "actor")) > 1e-4
    # The KL is to the teacher as it is: nothing in the first step, something once the two differ.
    kls = [row["actor_train/ref_kl"] for row in steps_of(ema)]
    assert kls[0] < 1e-6 < 1e-3 < kls[1]


@pytest.mark.ray
@pytest.mark.long
def test_a_teacher_does_not_depend_on_the_number_of_ranks(
    ema: RunSummary, two_processes: RayActors, tmp_path: Path
) -> None:
    """Two gloo ranks, weights sharded by FSDP, against one process."""
    apart = run(EMA, tmp_path, *EMA_OPTIONS, processes=two_processes)
    for ours, theirs in zip(steps_of(apart), steps_of(ema), strict=True):
        for name in ("actor_train/ref_kl", "actor_train/loss", "actor_gen/reward"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5)
    for model in ("actor", "teacher"):
        assert largest_difference(weights_of(apart, model), weights_of(ema, model)) < 1e-5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ["models.teacher.layout=d1"],
            r"follow .* teacher@infer is d1t1p1 on workers 0, and actor@train is d2t1p1 on workers 0, 1. "
            r"Give models.teacher the layout and group of models.actor",
        ),
        (
            ["models.teacher.group=other", "models.actor.layout=d1", "models.teacher.layout=d1"],
            r"follow .* teacher@infer is d1t1p1 on workers 1, and actor@train is d1t1p1 on workers 0",
        ),
        (
            ["models.actor.backend=megatron"],
            r"follow .* teacher@infer uses torch and actor@train uses megatron, which shard weights "
            r"differently. Set models.teacher.backend=megatron",
        ),
        (
            ["models.actor.backend=megatron", "models.teacher.backend=megatron", "models.actor.dtype=bf16"],
            r"follow .*: megatron keeps the weights of teacher in bf16, which is too coarse for small "
            r"updates. Set models.teacher.dtype=fp32, or backend=torch for both models",
        ),
    ],
)
def test_an_update_of_replicas_in_different_groups_is_refused(
    change: list[str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(NotYetError, match=reason):
        run(EMA, tmp_path, *EMA_OPTIONS, *change)
    assert list(tmp_path.iterdir()) == []


def test_an_update_of_two_architectures_names_the_weight(tmp_path: Path) -> None:
    other = ["+model@models.teacher=tiny-qwen2", "models.teacher.architecture.intermediate_size=256"]
    with pytest.raises(RunError, match=r"differ in .*mlp.*: 'teacher' has shape \[256, 128\], 'actor'"):
        run(EMA, tmp_path, *EMA_OPTIONS, *ALONE, *other)


def expected_betas(rows: list[dict[str, Any]]) -> list[float]:
    """The controller by hand: 8 sequences a step, a horizon of 80."""
    betas = [0.5]
    for row in rows[:-1]:
        error = (row["kl_reward/sequence_kl"] - 0.05) / 0.05
        betas.append(betas[-1] * (1 + 8 / 80 * min(max(error, -0.2), 0.2)))
    return betas


def test_an_adaptive_kl_weight_lives_from_step_to_step(ppo: RunSummary) -> None:
    rows = steps_of(ppo)
    betas = [row["kl_reward/beta"] for row in rows]
    assert betas == pytest.approx(expected_betas(rows), rel=1e-6)
    # In the first step actor and reference are equal: the weight falls by a fiftieth.
    assert betas[:2] == [0.5, pytest.approx(0.49)]
    assert len(set(betas)) == 5


@pytest.mark.ray
def test_the_state_of_a_node_is_the_same_on_two_workers(
    ppo: RunSummary, two_processes: RayActors, tmp_path: Path
) -> None:
    apart = run(PPO, tmp_path, *PPO_OPTIONS, processes=two_processes)
    for ours, theirs in zip(steps_of(apart), steps_of(ppo), strict=True):
        for name in ("beta", "sequence_kl"):
            assert ours[f"kl_reward/{name}"] == pytest.approx(theirs[f"kl_reward/{name}"], abs=1e-5)
