"""PPO in all placements: separate, paired or colocated models, each with its own layout.

The recipe is the same file each time; losses and weights are those of one process on one device.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from runs import ROOT, largest_difference, run, steps_of, weights_of

from hflow.runtime.records.run_summary import RunSummary
from hflow.workers.ray.ray_actors import RayActors

pytestmark = pytest.mark.ray

MANUAL = (ROOT / "docs" / "placement.md").read_text()
COMMANDS = dict(re.findall(r"^\| (.*) \| `hflow run (.*)` \|$", MANUAL, re.MULTILINE))
WHERE = re.compile(r"cluster=|placement=|models\.\w+\.backend=")
ALONE = ["workers=inproc", "cluster=cpu-1x1"]
SMALL = ["steps=2", "batch=32", "data.train.generator=null"]
TRAINED = ("actor", "critic")
for model in TRAINED:
    # A large eps: gradients that are zero but for rounding (key biases) must not become steps.
    SMALL += [f"models.{model}.optim.{key}" for key in ("lr=1e-3", "eps=1e-3", "warmup_steps=0")]
PPO = ["models.actor.path=null", "nodes.actor_train.after=0", "data.heldout.limit=6"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Additions whose right answer is none at all, which random weights give now and then."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{a:02d}+{a:02d}=", "answer": ""}) for a in range(40)))
    return f"data.train.path={path}"


Alone = dict[str, RunSummary]


@pytest.fixture(scope="module")
def alone(rows: str, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Each recipe of the commands in one process, on one device."""
    found: Alone = {}
    for command in COMMANDS.values():
        recipe, *overrides = shlex.split(command)
        if recipe not in found:
            kept = [override for override in overrides if not WHERE.match(override)]
            out = tmp_path_factory.mktemp("alone")
            found[recipe] = run(recipe, out, *kept, *ALONE, *small(recipe, rows))
    return found


def small(recipe: str, rows: str) -> list[str]:
    """Two steps from random weights, in which both models change."""
    return [*SMALL, rows, *(PPO if recipe == "recipes/ppo.py" else [])]


def test_all_seven_deployments_are_documented() -> None:
    placements = [" ".join(shlex.split(command)) for command in COMMANDS.values()]
    assert len(placements) == 7
    assert all("placement=" in command for command in placements)


@pytest.mark.first(5)
@pytest.mark.parametrize("deployment", COMMANDS)
def test_placement_changes_no_result(
    deployment: str, alone: Alone, rows: str, four_processes: RayActors, tmp_path: Path
) -> None:
    recipe, *overrides = shlex.split(COMMANDS[deployment])
    placed = run(recipe, tmp_path, *overrides, *small(recipe, rows), processes=four_processes)
    expected = steps_of(alone[recipe])
    assert len(expected) == 2
    for ours, theirs in zip(steps_of(placed), expected, strict=True):
        assert ours["actor_gen/num_tokens"] == theirs["actor_gen/num_tokens"]
        for key in ("kl_reward/sequence_kl", *figures()):
            # Losses of whitened advantages are sums around 0; rounding is relative to their parts, about 1.
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key
    for model in TRAINED:
        difference = largest_difference(weights_of(placed, model), weights_of(alone[recipe], model))
        assert difference < 1e-5, model


def figures() -> list[str]:
    return [f"{model}_train/{figure}" for model in TRAINED for figure in ("loss", "grad_norm")]


def test_the_compared_steps_change_the_weights(alone: Alone) -> None:
    """Rewards differ between samples, and both models have moved by more than the tolerance."""
    first, second = steps_of(alone["recipes/ppo.py"])
    assert 0 < first["actor_gen/reward"] < 1
    assert second["kl_reward/sequence_kl"] > 0.01
    for figure in figures():
        assert first[figure] != pytest.approx(second[figure], rel=0.01)
