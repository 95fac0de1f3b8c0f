"""Models that see on several workers: their towers too are divided, sent, verified and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import vision_kit as kit
from runs import SharedProcesses, run
from transformers import AutoModelForImageTextToText

from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.twin import twin
from hflow.shapes.model_shape import tensors

pytestmark = [pytest.mark.ray, pytest.mark.slow]
FAMILIES = [
    family if family == "qwen3_vl" else pytest.param(family, marks=pytest.mark.long)
    for family in kit.ARCHITECTURES
]
APART = ("cluster=cpu-1x3", "placement='actor=0-1:d2 actor.gen=2:d1'", "schedule.max_staleness=1")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_process_does(
    family: str, tmp_path: Path, shared_processes: SharedProcesses
) -> None:
    """Samples have no, one or two images, so that ranks join the tower for micro-batches without any."""
    recipe = kit.write_recipe(tmp_path, family)
    report = twin(recipe, [], ["d2"], 3, lambda line: None, shared_processes.take(3))
    (result,) = report.results
    assert result.failed_metrics == ()
    assert result.failed_weights == ()
    norms = [pair.scale for pair in result.metrics if pair.name.endswith("/grad_norm")]
    assert min(norms) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_of_its_own_gets_verified_weights(
    family: str, tmp_path: Path, shared_processes: SharedProcesses
) -> None:
    """The engine compares checksums of all that it receives; the checkpoint has every tensor of the plan."""
    recipe = kit.write_recipe(tmp_path, family)
    summary = run(recipe, tmp_path, "steps=3", *APART, processes=shared_processes.take(3))
    assert summary.steps == 3
    plan = compile_recipe(recipe, list(APART)).plan
    (route,) = plan.weights
    assert route.how == "pull"
    sent = {row.tensor.format(layer) for row in route.rows for layer in range(*(row.layers or (0, 1)))}
    shape = dict(plan.shapes)["actor"]
    assert sent == {spec.name for spec in tensors(shape)}
    saved = summary.directory / "checkpoints" / "latest" / "actor"
    model = AutoModelForImageTextToText.from_pretrained(saved)  # which knows the names of published files
    assert {name: tuple(weight.shape) for name, weight in model.named_parameters()} == {
        spec.name: spec.shape for spec in tensors(shape)
    }
