"""The recipes of GSM8K can be planned with each of their setups, and fit with a margin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hflow.launch.planning.compile import Compiled, compile_recipe
from hflow.planner.forecast.communicators import communicators
from hflow.planner.plan.forecast import Forecast
from hflow.planner.plan.rows import Plan

GSM8K = Path(__file__).parents[2] / "recipes" / "gsm8k"
SETUPS = sorted(file.stem for file in (GSM8K / "setup").glob("*.yaml"))
TABLE = re.compile(
    r"^\| `hflow run recipes/gsm8k/(.+?)` \|.*\| ([\d.]+) s \| ([\d.]+) of ([\d.]+) GiB \|", re.MULTILINE
)
ROWS = TABLE.findall((GSM8K / "README.md").read_text())


def planned(command: str) -> Compiled:
    file, *overrides = command.split()
    return compile_recipe(GSM8K / file, overrides)


NOT_HERE = "Its sizes are those of the architecture; a run needs the model."
"""What a plan says of a model of the Hub that is not in the cache."""


def peak(forecast: Forecast) -> float:
    """GiB of the fullest device in its fullest phase."""
    return max(phase.total for phase in forecast.memory) / 2**30


def known_communicators(command: str, plan: Plan) -> set[int]:
    """The numbers of NCCL communicators that devices have."""
    if command.startswith("grpo_async.py"):
        return {2, 3}  # each of five trainers sends to one of three engines, which pass it on
    if "8x80g" not in command and command != "grpo_7b.py":
        return {2} if "2x24g" in command else {0}
    (engine,) = {plan.replica(engine.replica).layout for engine in plan.engines}
    return {2} if engine.tensor > 1 else {1}  # that of all trainers, and one among the ranks of an engine


@pytest.mark.first(6)
@pytest.mark.parametrize(("command", "seconds", "gib", "most"), ROWS, ids=[row[0] for row in ROWS])
def test_a_plan_fits_with_a_margin_as_the_table_says(command: str, seconds: str, gib: str, most: str) -> None:
    compiled = planned(command)
    assert [warning for warning in compiled.plan.warnings if NOT_HERE not in warning] == []
    forecast = compiled.plan.forecast
    assert forecast.missing == ()
    assert forecast.period is not None
    assert forecast.period.seconds == pytest.approx(float(seconds), rel=0.1)
    assert peak(forecast) == pytest.approx(float(gib), rel=0.05)
    assert peak(forecast) <= 0.92 * float(most)
    joined = communicators(compiled.plan, range(compiled.plan.cluster.num_devices))
    assert set(map(len, joined.values())) == known_communicators(command, compiled.plan)


def test_the_table_has_every_recipe_and_every_setup() -> None:
    commands = [row[0] for row in ROWS]
    assert {command.split()[0] for command in commands} == {file.name for file in GSM8K.glob("*.py")}
    assert {name for name in SETUPS if any(f"setup={name}" in command for command in commands)} == set(SETUPS)


def test_the_recipe_of_one_model_is_its_setup() -> None:
    named, general = planned("grpo_7b.py"), planned("grpo.py setup=qwen2.5-7b-8x80g")
    assert named.plan.digest == general.plan.digest
