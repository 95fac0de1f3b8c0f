"""Tasksets, agents and environments of verifiers 0.4 and later (`verifiers.v1`)."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any


class TasksetEnvironment:
    """A taskset with its agents. Its episodes wait for completions, so they are tasks of one event loop.

    Args:
        args: the `env` block of verifiers' configuration, without `taskset.id`. Agents run in the runtime
            `subprocess` unless they say otherwise.
    """

    one_process = True

    def __init__(self, env: str, args: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment

        # Harnesses start their programs by `uv`, which may be installed beside this interpreter only.
        own = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join((own, os.environ.get("PATH", os.defpath)))
        config = _config(env, args)
        self._environment = load_environment(config)
        self._task_type = type(self._environment.taskset).task_type()
        self._check_tasks()
        self._check_agents()
        self._numbers = itertools.count()
        self._ready: asyncio.Future[None] | None = None

    def rows(self, split: str, size: int, select: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the data of the tasks that `select` chooses, as verifiers' `--select`; `size` at most."""
        from verifiers.v1.configs.select import SelectConfig

        if split != "train":
            raise ValueError(
                "tasksets have no splits; leave out split, and choose tasks by arguments.select, such as "
                '{"include": {"idx": ["0:100"]}}'
            )
        with _one_line("arguments.select"):
            tasks = self._environment.taskset.select(SelectConfig.model_validate(select))
        tasks = tasks if size < 0 else tasks.take(size)
        if not tasks.bounded:
            raise ValueError("the taskset has no last task; set arguments.size")
        return [task.data.model_dump(mode="json") for task in tasks]

    def open(self) -> TasksetEnvironment:
        """Return the object whose methods an episode calls."""
        return self

    async def rollout(
        self, example: dict[str, Any], base_url: str, api_key: str, model: str
    ) -> dict[str, Any]:
        """Run an episode of a task, with an endpoint of its own, and return its rewards.

        `sessions` are the ids of the traces that are trained: those of agents with hflow's model that their
        environment does not exclude. The reward is the mean of theirs.
        """
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        await self._serve()
        task = self._task_type(
            self._task_type.data_type().model_validate(example), self._environment.config.taskset.task
        )
        (slot,) = self._environment.slots(task)
        with _variable(f"HFLOW_API_KEY_{next(self._numbers)}", api_key) as name:
            client = EvalClientConfig(base_url=base_url, api_key_var=name)
            episode = await self._environment.run_slot(slot, ModelContext(model=model, client=client))
        trained = [
            t for t in episode.traces if t.ok and t.agent.trainable and t.agent.config.client == client
        ]
        return {
            "reward": fmean(t.reward for t in trained) if trained else 0.0,
            "metrics": self._metrics(trained),
            "error": self._find_error(episode, trained),
            "sessions": [t.id for t in trained],
        }

    async def _serve(self) -> None:
        """Start what all episodes share, such as servers of tools, unless it runs."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._hold(self._ready))
        await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._environment.serving():
                # A shared server keeps a client for each endpoint, and each episode has its own. Without
                # one, each rollout starts a server.
                self._environment._interception = None
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - the reason for which episodes are refused
            ready.set_exception(error)

    def _metrics(self, traces: list[Any]) -> dict[str, float]:
        """Return each function's mean over traces. Names begin with the agent's if there are several."""
        from verifiers.v1.configs.agent import agent_config_fields

        has_several = len(agent_config_fields(self._environment.config)) > 1
        found: dict[str, list[float]] = {}
        for trace in traces:
            scores = {name: reward and reward.score for name, reward in trace.rewards.items()}
            for name, value in (trace.metrics | scores).items():
                if value is not None:
                    found.setdefault(f"{trace.agent.name}.{name}" if has_several else name, []).append(value)
        return {name: fmean(values) for name, values in found.items()}

    def _find_error(self, episode: Any, trained: list[Any]) -> str | None:
        """Return the reason for which an episode has no reward; None if it has one."""
        failed = [error for trace in episode.traces if not trace.ok for error in trace.errors]
        if not self._environment.complete(episode):
            errors = [*failed, *episode.errors]
            first = f"{errors[0].type}: {errors[0].message}" if errors else "it did not complete"
            return " ".join(first.split())
        if not trained:
            return "it has no agent that is trained on this model"
        for trace in trained:
            if not trace.rewards:
                return "it gave no reward"
            if missing := [name for name, reward in trace.rewards.items() if reward is None]:
                return f"the reward {missing[0]} was not computed: {trace.stop_condition}"
        return None

    def _check_tasks(self) -> None:
        data = self._task_type.data_type()
        if hidden := [name for name, field in data.model_fields.items() if field.exclude]:
            raise ValueError(
                f"{data.__name__}.{hidden[0]} is excluded from JSON, so no episode would receive it; remove "
                "exclude=True"
            )

    def _check_agents(self) -> None:
        """Check what every task of an environment with one agent would be refused for."""
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.compile import validate_pairing
        from verifiers.v1.utils.loaders import load_harness

        config = self._environment.config
        if type(self._environment) is SingleAgentEnv:
            harness = load_harness(config.agent_harnesses()["agent"])
            tools = self._task_type.toolsets(config.taskset.task)
            validate_pairing(harness, self._task_type, config.agent.runtime, tools=tools)


def _config(env: str, args: dict[str, Any]) -> Any:
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    taskset = args.get("taskset", {})
    if not isinstance(taskset, dict) or "id" in taskset:
        raise ValueError("args.taskset must be an object without id, which is env")
    block = {**args, "taskset": {**taskset, "id": env}}
    kind: Any = env_config_type(env, args.get("id", ""))
    for name, field in kind.model_fields.items():
        agent, given = field.default, block.get(name, {})
        is_agent = isinstance(agent, AgentConfig) and isinstance(given, dict)
        if is_agent and "runtime" not in agent.model_fields_set:
            block[name] = {"runtime": {"type": "subprocess"}, **given}
    with _one_line("args"):
        return kind.model_validate(block)


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn a validation error into one line that names the wrong keys of `name`."""
    from pydantic import ValidationError

    try:
        yield
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, (name, *e['loc'])))}: {e['msg']}" for e in error.errors()]
        raise ValueError("; ".join(problems)) from None


@contextmanager
def _variable(name: str, value: str) -> Iterator[str]:
    """Set an environment variable, from which verifiers reads a key; programs of agents do not inherit it."""
    os.environ[name] = value
    try:
        yield name
    finally:
        del os.environ[name]
