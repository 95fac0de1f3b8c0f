"""`nodes.gymnasium`: a model plays an environment of the package `gymnasium` in a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.base.errors import ConfigError
from hflow.dsl import generate
from hflow.environments.interface import Adapter, HostSettings, json_object, read_host_settings
from hflow.environments.play import play
from hflow.types import Engine, Trajectory


@generate(returns=("reward", "num_steps", "num_unreadable"))
async def gymnasium(
    engine: Engine,
    seed: int,
    *,
    id: str = "",
    options: str = "{}",
    render: str = "",
    actions: tuple[str, ...] = (),
    instructions: str = "",
    max_steps: int = 20,
    step_timeout: float = 30.0,
    python: str | None = None,
    requirements: str | None = None,
    start_timeout: float = 300.0,
) -> tuple[Trajectory, float, int, int]:
    """Let the model play an environment of gymnasium. Observations are messages of the user.

    Returns the conversation, the sum of the environment's rewards, the number of its steps, and that of
    replies without an action. Such a reply uses one of `max_steps`, but is no step of the environment; the
    next message repeats the instructions.

    Args:
        engine: generates the actions.
        seed: the seed of the environment's `reset`, a column of the dataset.
        id: the environment, such as `FrozenLake-v1`, or `MODULE:ID` with the module that registers it.
        options: arguments of `gymnasium.make` as JSON, such as `{"is_slippery": false}`.
        render: the text of an observation: `ansi`, as the environment prints itself; `observation`, its
            value; or `FILE.py:FUNCTION`, a function of the observation. Default: `ansi` where there is one.
        actions: names of the actions of a `Discrete` space, in order. Default: their numbers.
        instructions: the text in front of the first observation. Default: the actions.
        max_steps: most replies of an episode.
        step_timeout: seconds that one step may take.
        python: path of the interpreter that has the package. Default: that of hflow.
        requirements: a file in pip's format, installed once on each machine.
        start_timeout: seconds in which the environment must be loaded, before the run begins.
    """
    settings = {
        "id": id,
        "options": options,
        "render": render,
        "actions": list(actions),
        "python": python,
        "requirements": requirements,
        "start_timeout": start_timeout,
    }
    played = await play(
        engine,
        max_steps,
        adapter="gymnasium",
        settings=settings,
        arguments={"seed": seed, "instructions": instructions},
        timeout=step_timeout,
    )
    return played.talk, sum(played.rewards, 0.0), played.num_steps, played.num_unreadable


def _host_settings(knobs: Mapping[str, Any]) -> HostSettings:
    if not knobs.get("id"):
        raise ConfigError("set id to an environment of gymnasium, such as FrozenLake-v1")
    load = {
        "id": knobs["id"],
        "options": json_object(knobs.get("options", "{}"), "options"),
        "render": knobs.get("render", ""),
        "actions": list(knobs.get("actions", ())),
    }
    return read_host_settings(__file__, load, "gymnasium", knobs)


ADAPTER = Adapter("gymnasium", gymnasium, _host_settings)
