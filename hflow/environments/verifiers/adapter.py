"""`nodes.verifiers`: episodes and rewards of an environment of the package `verifiers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hflow.base.errors import ConfigError, EpisodeError
from hflow.dsl import generate
from hflow.environments.client import open_environment
from hflow.environments.interface import Adapter, HostSettings, json_object, read_host_settings
from hflow.types import Engine, Metrics, Trajectory


@generate(returns="reward")
async def verifiers(
    engine: Engine,
    example: dict[str, Any],
    *,
    env: str = "",
    args: str = "{}",
    replay: Literal["again", "never"] = "again",
    python: str | None = None,
    requirements: str | None = None,
    start_timeout: float = 300.0,
) -> tuple[list[Trajectory], float, Metrics]:
    """Let an environment of verifiers run its episode, and score it.

    Returns the trajectories of its conversations, which are one sample, the environment's reward, and each
    of its reward and metric functions as a metric. A conversation that only grows is one trajectory. The
    environment sends its requests to this node's model, so sampling is that of the node.

    Args:
        engine: generates what the environment requests.
        example: a row of the environment's dataset, which `data.NAME.generator=verifiers:ENV` reads.
        env: the environment. Up to verifiers 0.2, the name of an installed one, or `MODULE:CLASS` of a class
            with one. From 0.4, the id of a taskset.
        args: the arguments of the environment as JSON, such as `{"gym": "gcd"}`. From 0.4, the `env` block of
            the configuration, such as `{"agent": {"harness": {"id": "null"}}}`.
        replay: what an episode does that is interrupted: `again` repeats what the environment did with the
            completions that it had; `never` begins again, for environments that are not repeatable.
        python: path of the interpreter that has the package. Default: that of hflow.
        requirements: a file in pip's format, installed once on each machine.
        start_timeout: seconds in which the environment must be loaded, before the run begins.
    """
    settings = {
        "env": env,
        "args": args,
        "python": python,
        "requirements": requirements,
        "start_timeout": start_timeout,
    }
    remote: Any = await engine.environment(
        open_environment, adapter="verifiers", settings=settings, arguments={}, replay=replay
    )
    async with engine.endpoint() as endpoint:
        # Not by `engine.call`: its completions are in the journal, and the environment is to run again.
        done = await remote.call(
            "rollout",
            example=example,
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            model=endpoint.model,
        )
    if done["error"]:
        raise EpisodeError(f"the environment {env} failed: {done['error']}")
    sessions, made = done["sessions"], zip(endpoint.sessions, endpoint.trajectories, strict=True)
    trained = [talk for session, talk in made if sessions is None or session in sessions]
    if not trained:
        raise EpisodeError(f"the environment {env} requested no completion that can be trained")
    return trained, done["reward"], done["metrics"]


def _host_settings(knobs: Mapping[str, Any]) -> HostSettings:
    if not knobs.get("env"):
        raise ConfigError("set env to an environment of verifiers, such as vf-gsm8k")
    load = {"env": knobs["env"], "args": json_object(knobs.get("args", "{}"), "args")}
    is_own = knobs.get("python") is None and knobs.get("requirements") is None
    packages = "'verifiers<0.3'" if is_own else "verifiers"  # 0.4 has pins that change hflow's interpreter
    return read_host_settings(__file__, load, packages, knobs)


ADAPTER = Adapter("verifiers", verifiers, _host_settings)
