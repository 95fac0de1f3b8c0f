"""`nodes.openenv`: a model plays an environment of the package `openenv` in a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from hflow.base.errors import ConfigError, EpisodeError
from hflow.dsl import generate
from hflow.environments.interface import Adapter, HostSettings, json_object, read_host_settings
from hflow.environments.play import play
from hflow.types import Engine, Trajectory


@generate(returns=("reward", "num_steps", "num_unreadable"))
async def openenv(
    engine: Engine,
    seed: int,
    *,
    url: str = "",
    module: str = "",
    image: str = "",
    options: str = "{}",
    render: str = "",
    parse: str = "",
    instructions: str = "",
    max_steps: int = 20,
    step_timeout: float = 60.0,
    replay: Literal["again", "never"] = "again",
    python: str | None = None,
    requirements: str | None = None,
    start_timeout: float = 300.0,
) -> tuple[Trajectory, float, int, int]:
    """Let the model play an environment of OpenEnv. Observations are messages of the user.

    Returns the conversation, the sum of the environment's rewards, the number of its steps, and that of
    replies without an action. Such a reply uses one of `max_steps`, but is no step of the environment; the
    next message repeats the instructions.

    Args:
        engine: generates the actions.
        seed: the seed of the environment's `reset`, a column of the dataset.
        url: a server of the environment that runs, such as `http://127.0.0.1:8000`.
        module: the environment's application, such as `my_env.server.app:app`: each episode has a server.
        image: an image of a server, such as `my-env:latest`: each episode has a container of this machine's
            Docker.
        options: further arguments of `reset` as JSON, such as `{"level": 2}`.
        render: the text of an observation: the name of a field, or `FILE.py:FUNCTION`, a function of its
            dict. Default: all fields.
        parse: `FILE.py:FUNCTION`, a function of a reply that returns the dict of an action, or None. Default:
            the action's only field, or a JSON object.
        instructions: the text in front of the first observation. Default: the form of actions.
        max_steps: most replies of an episode.
        step_timeout: seconds that the reset, and one step, may take. With `image`, the reset includes the
            start of the container.
        replay: what an episode does that is interrupted: `again` resets the environment with its seed and
            makes its steps again; `never` begins again, for environments that are not repeatable.
        python: path of the interpreter that has the package. Default: that of hflow.
        requirements: a file in pip's format, installed once on each machine.
        start_timeout: seconds in which the environment must be loaded, before the run begins.
    """
    settings = {
        "url": url,
        "module": module,
        "image": image,
        "options": options,
        "render": render,
        "parse": parse,
        "python": python,
        "requirements": requirements,
        "start_timeout": start_timeout,
    }
    played = await play(
        engine,
        max_steps,
        adapter="openenv",
        settings=settings,
        arguments={"seed": seed, "instructions": instructions},
        timeout=step_timeout,
        replay=replay,
    )
    if played.num_steps and not played.rewards:
        raise EpisodeError(f"the environment gave no reward in {played.num_steps} steps")
    return played.talk, sum(played.rewards, 0.0), played.num_steps, played.num_unreadable


def _host_settings(knobs: Mapping[str, Any]) -> HostSettings:
    if sum(bool(knobs.get(name)) for name in ("url", "module", "image")) != 1:
        raise ConfigError(
            "set one of url, a server of OpenEnv such as http://127.0.0.1:8000; module, the application of "
            "an environment such as my_env.server.app:app; or image, that of a server such as my-env:latest"
        )
    load = {name: knobs.get(name, "") for name in ("url", "module", "image", "render", "parse")}
    load["options"] = json_object(knobs.get("options", "{}"), "options")
    settings = read_host_settings(__file__, load, "'openenv>=0.10,<0.11'", knobs)
    return replace(settings, starts_containers=bool(knobs.get("image")))


ADAPTER = Adapter("openenv", openenv, _host_settings)
