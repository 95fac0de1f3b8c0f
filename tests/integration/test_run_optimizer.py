"""A model resumed from a checkpoint with its optimizer trains as if it had not been interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import largest_difference, run, weights_of

from hflow.base.errors import ConfigError
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import model_settings

# Every step takes the same eight rows, so that a run which starts anew continues with the same data.
SFT = ["workers=inproc", "cluster=cpu-1x1", "batch=8", "data.train.limit=8", "nodes.eval_gen.after=1000"]
OPTIM = ["models.actor.optim.warmup_steps=3", "data.heldout.limit=8"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After two of four steps."""
    summary = run("recipes/sft.py", tmp_path_factory.mktemp("half"), *SFT, *OPTIM, "steps=2")
    return (summary.directory / "checkpoints" / "latest" / "actor").resolve()


@pytest.mark.first(1)
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_two_and_two_steps_are_four(checkpoint: Path, tmp_path: Path, backend: str) -> None:
    whole = run("recipes/sft.py", tmp_path / "whole", *SFT, *OPTIM, "steps=4")
    second = [*SFT, *OPTIM, "steps=2", f"models.actor.path={checkpoint}", f"models.actor.backend={backend}"]
    resumed = run("recipes/sft.py", tmp_path / "resumed", *second, "models.actor.resume=true")
    falling = [*second, "models.actor.resume=true", "models.actor.optim.schedule=linear"]
    settings = model_settings(compile_recipe("recipes/sft.py", falling))["actor"]
    assert settings.num_updates == 4  # the learning rate ends with the run, and not two updates before it
    begun = run("recipes/sft.py", tmp_path / "begun", *second, "models.actor.save_optimizer=false")
    assert largest_difference(weights_of(whole), weights_of(resumed)) < 1e-6
    assert largest_difference(weights_of(whole), weights_of(begun)) > 1e-4
    assert (resumed.directory / "checkpoints" / "latest" / "actor" / "shards").is_dir()
    assert not (begun.directory / "checkpoints" / "latest" / "actor" / "shards").exists()


def test_resuming_needs_a_saved_optimizer(checkpoint: Path, tmp_path: Path) -> None:
    resume = "models.actor.resume=true"
    with pytest.raises(ConfigError, match=r"models.actor.resume needs a checkpoint; set models.actor.path"):
        run("recipes/sft.py", tmp_path, *SFT, *OPTIM, resume)
    summary = run("recipes/sft.py", tmp_path, *SFT, *OPTIM, "steps=1", "models.actor.save_optimizer=false")
    bare = (summary.directory / "checkpoints" / "latest" / "actor").resolve()
    with pytest.raises(ConfigError, match=r"no optimizer state \(shards/\); set models.actor.resume=false"):
        run("recipes/sft.py", tmp_path, *SFT, *OPTIM, resume, f"models.actor.path={bare}")
    models = [f"models.{name}.path={checkpoint}" for name in ("actor", "ref")]
    frozen = ["workers=inproc", "cluster=cpu-1x1", *models, "models.ref.resume=true"]
    with pytest.raises(ConfigError, match=r"models.ref.resume is for trained models, but ref is frozen"):
        run("recipes/ppo.py", tmp_path, *frozen)
