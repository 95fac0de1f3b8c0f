"""`nodes.dice`: a model guesses a roll."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow import Engine, Trajectory, generate
from hflow.environments.client import open_environment
from hflow.environments.interface import Adapter, HostSettings, read_host_settings


@generate(returns="reward")
async def dice(
    engine: Engine,
    prompt: str,
    *,
    sides: int = 6,
    one_process: bool = False,
    python: str | None = None,
    requirements: str | None = None,
    start_timeout: float = 300.0,
) -> tuple[Trajectory, float]:
    """Guess the roll of a die."""
    settings = {
        "sides": sides,
        "one_process": one_process,
        "python": python,
        "requirements": requirements,
        "start_timeout": start_timeout,
    }
    die: Any = await engine.environment(
        open_environment, adapter="dice", settings=settings, arguments={"seed": int(1000 * engine.random())}
    )
    talk = await engine.complete(prompt)
    roll: int = await engine.call(die.call, method="roll")
    return talk, float(str(roll) in talk.completion)


def _host_settings(knobs: Mapping[str, Any]) -> HostSettings:
    load = {"sides": knobs.get("sides", 6), "one_process": knobs.get("one_process", False)}
    return read_host_settings(__file__, load, "dice", knobs)


ADAPTER = Adapter("dice", dice, _host_settings)
