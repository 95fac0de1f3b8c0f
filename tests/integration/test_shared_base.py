"""Runs of several models with adapters on one base: they are those with bases of their own, and resume so."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT, largest_difference, run, steps_of
from safetensors.torch import load_file

from hflow.base.errors import PlanError
from hflow.config.schema import ModelConfig
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running import run_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.models.descriptors import training_backend
from hflow.runtime.ledger import audit
from hflow.runtime.records.run_summary import RunSummary
from hflow.training.interface import ENGINE_GAP_MAX
from hflow.workers.worker import build_backends, hosted_replicas

COMMON = ["workers=inproc", "cluster=cpu-1x1", "batch=8", "data.train.limit=32"]
SELF_PLAY = [*COMMON, "nodes.alice_eval.after=99", "nodes.bob_eval.after=99"]
SELF_PLAY += ["models.alice.lora={r: 4, alpha: 8}", "models.bob.lora={r: 2, alpha: 8}"]
SELF_PLAY += [f"models.{name}.optim={{lr: 1e-2, warmup_steps: 0}}" for name in ("alice", "bob")]
PPO = [*COMMON, "nodes.eval_gen.after=99", "nodes.actor_train.after=0", "models.critic.base_of=actor"]
PPO += ["models.actor.lora={r: 4, alpha: 8}", "models.critic.lora={r: 2, alpha: 8}"]
SHARED = "models.bob.base_of=alice"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    """Return a run of two policies, each with a base of its own."""
    saved = ["save_every=1", "keep_checkpoints=null", "steps=3"]
    return run("recipes/self_play.py", tmp_path_factory.mktemp("alone"), *SELF_PLAY, *saved)


def adapters(summary: RunSummary) -> dict[str, torch.Tensor]:
    latest = summary.directory / "checkpoints/latest"
    return {
        f"{model} {name}": tensor
        for model in ("alice", "bob")
        for name, tensor in load_file(latest / model / "adapter_model.safetensors").items()
    }


# Engines use the trainers' weights at first, and in the other settings a copy of their own for both models.
LONG = [("dtype=bf16",), ("backend=megatron",)]


@pytest.mark.parametrize("settings", [(), *(pytest.param(x, marks=pytest.mark.long) for x in LONG)])
def test_two_policies_play_as_with_a_base_each(
    alone: RunSummary, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Bit for bit, in rewards, losses and adapters, which both change."""
    other = [f"models.{name}.{key}" for name in ("alice", "bob") for key in settings]
    wanted = run("recipes/self_play.py", tmp_path / "a", *SELF_PLAY, *other, "steps=3") if other else alone
    shared = run("recipes/self_play.py", tmp_path / "b", *SELF_PLAY, *other, SHARED, "steps=3")
    for before, after in zip(steps_of(wanted), steps_of(shared), strict=True):
        names = [
            name for name in before if name.startswith(("alice_train/", "bob_train/", "alice_play/reward"))
        ]
        assert len([name for name in names if "loss" in name]) > 1
        timed = ("seconds", "per_second", "mfu")
        assert {n: before[n] for n in names if not n.endswith(timed)} == {
            n: after[n] for n in names if not n.endswith(timed)
        }
    assert largest_difference(adapters(shared), adapters(wanted)) == 0


def test_two_policies_have_one_vllm(tmp_path: Path) -> None:
    """Its steps mix their requests. Each draws from its own adapters, of which every version is verified."""
    pytest.importorskip("vllm")
    vllm = [SHARED, "models.alice.gen.engine=vllm", "steps=3"]
    summary = run("recipes/self_play.py", tmp_path, *SELF_PLAY, *vllm)
    assert [path.name for path in (summary.directory / "engines").iterdir()] == ["alice@gen-0.log"]
    for row in steps_of(summary):
        for name in ("alice", "bob"):
            assert row[f"{name}_train/{ENGINE_GAP_MAX.suffix}"] < 1e-4
    assert audit(summary.directory / "ledger.sqlite") == []
    moved = [x for name, x in adapters(summary).items() if "lora_B" in name]
    assert min(float(x.abs().max()) for x in moved) > 1e-3


def test_a_run_resumes_with_and_without_a_common_base(alone: RunSummary, tmp_path: Path) -> None:
    copy = tmp_path / "interrupted"
    shutil.copytree(alone.directory, copy, symlinks=True)
    for last, key in ((1, SHARED), (2, "models.bob.base_of=null")):
        for step in range(last + 1, 4):
            shutil.rmtree(copy / "checkpoints" / f"step-{step}")
        resumed = run_recipe.resume(str(copy), [key], live=False)
        assert largest_difference(adapters(resumed), adapters(alone)) == 0
    with pytest.raises(PlanError, match=r"models\.bob\.lora\.r: 2 -> 4"):
        run_recipe.resume(str(copy), [SHARED, "models.bob.lora.r=4", "steps=4"], live=False)


@pytest.mark.parametrize("library", ["torch", "megatron"])
def test_a_critic_and_a_reference_have_no_weights_in_memory(library: str) -> None:
    """What is allocated is what the plan says."""
    pytest.importorskip(library)
    choice = [f"models.{name}.backend={library}" for name in ("actor", "critic", "ref")]
    compiled = compile_recipe(ROOT / "recipes/ppo.py", [*PPO, *choice])
    setup = make_setup(compiled)
    backends: dict[str, Any] = dict(build_backends(setup, hosted_replicas(setup, [0]), None))
    held: dict[int, int] = {}
    for backend in backends.values():
        optimizer = backend._optimizer
        states = () if optimizer is None else optimizer.states()
        if library == "megatron" and optimizer is not None:
            states = (*states, *optimizer.gradients())
        for tensor in (*module_of(backend).parameters(), *states):
            held[tensor.data_ptr()] = tensor.nbytes
    planned = padding = 0
    shapes = dict(compiled.plan.shapes)
    for name in backends:
        replica = compiled.plan.replica(name)
        config = compiled.config.models.get(replica.model, ModelConfig())
        rank = Rank(replica, shapes[replica.model], config, 0, True, True)
        planned += training_backend(library).memory.model_state(rank).total()
    if library == "megatron":  # pads the vocabulary to 128 tokens, and gradient buffers to 128 numbers
        padding = 4 * (128 - shapes["actor"].vocab) * shapes["actor"].hidden
    assert 0 <= sum(held.values()) - planned - padding < (1 if library == "torch" else 4 * 128)
    ours, critic = (module_of(backends[name]).parameters() for name in ("actor@train", "critic@train"))
    assert next(ours) is next(critic)  # of the embedding


def module_of(backend: Any) -> torch.nn.Module:
    """Return the module of a backend's model."""
    module: torch.nn.Module = backend._runner.module if "_model" in vars(backend) else backend._stage.module
    return module
