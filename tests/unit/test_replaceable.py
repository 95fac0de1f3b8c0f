"""Which workers can be replaced while a run continues, from the plan alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.launch.planning.compile import compile_recipe
from hflow.planner.plan.routing import replaceable_workers

RECIPES = Path(__file__).parents[2] / "recipes"
ENGINE = {1: "actor@gen"}
KEY = "models.actor.gen"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ENGINE),
        ((f"{KEY}.transport=disk",), ENGINE),
        ((f"{KEY}.transport=collective",), ENGINE),
        ((f"{KEY}.delta=true",), ENGINE),
        (("cluster=cpu-1x3", "placement=actor=0 actor.gen=1-2"), {**ENGINE, 2: "actor@gen"}),
        (
            ("cluster=cpu-1x3", "placement=actor=0 actor.gen=1-2:t2", f"{KEY}.engine=vllm"),
            {**ENGINE, 2: "actor@gen"},
        ),
        (("placement=actor=0 actor.gen=0",), {}),
    ],
)
def test_engines_on_devices_of_their_own_can_be_replaced(
    overrides: tuple[str, ...], expected: dict[int, str]
) -> None:
    model = ("models.actor.path=null", "cluster=cpu-1x2")
    assert (
        replaceable_workers(compile_recipe(RECIPES / "grpo_async.py", (*model, *overrides)).plan) == expected
    )
