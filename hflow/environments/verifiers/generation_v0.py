"""Environments of verifiers up to version 0.2, loaded by `load_environment`."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from typing import Any

_problems: ContextVar[list[str] | None] = ContextVar("problems", default=None)
"""The errors of reward functions in this episode."""


class _RubricErrors(logging.Handler):
    """Keeps what rubrics log: they give a reward of 0 where a function raised."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep an error of the episode in which it was logged."""
        problems = _problems.get()
        if problems is not None and record.levelno >= logging.ERROR:
            problems.append(record.getMessage())


class Environment:
    """An environment. Its episodes wait for completions, so they are tasks of one event loop."""

    one_process = True

    def __init__(self, env: str, args: dict[str, Any]) -> None:
        import openai
        import verifiers
        from hflow_host import load_name

        # A client takes 30 ms to make, so episodes share one. The engine may sleep, so it has no timeout.
        self._client = openai.AsyncOpenAI(
            base_url="http://127.0.0.1", api_key="-", timeout=None, max_retries=0
        )
        if ":" in env:
            self._environment = load_name(env)(**args)
        else:
            self._environment = verifiers.load_environment(env, **args)
        if self._environment.requires_group_rollouts:
            raise ValueError(
                f"{env} scores the episodes of a group together; remove its group reward functions"
            )
        logging.getLogger("verifiers").addHandler(_RubricErrors())

    def rows(self, split: str, size: int, select: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the examples of a split: `train` or `heldout`. -1: all."""
        if select:
            raise ValueError("environments of verifiers 0.2 have splits; remove arguments.select")
        is_train = split == "train"
        dataset = (self._environment.get_dataset if is_train else self._environment.get_eval_dataset)(n=size)
        return [json.loads(json.dumps(dict(row), default=str)) for row in dataset]

    def open(self) -> Environment:
        """Return the object whose methods an episode calls."""
        return self

    async def rollout(
        self, example: dict[str, Any], base_url: str, api_key: str, model: str
    ) -> dict[str, Any]:
        """Run an episode of an example, with an endpoint of its own, and return its rewards."""
        from verifiers.clients import OpenAIChatCompletionsClient

        problems: list[str] = []
        _problems.set(problems)
        client = OpenAIChatCompletionsClient(self._client.with_options(base_url=base_url, api_key=api_key))
        output = await self._environment.run_rollout(example, client, model, {})
        error, reward = output.get("error"), output["reward"]
        reason = problems[0] if problems else error and json.dumps(error, default=str)
        if reward is None and not reason:
            reason = "it gave no reward"
        return {
            "reward": float(reward or 0.0),
            "metrics": {name: float(value) for name, value in (output["metrics"] or {}).items()},
            "error": reason,
            "sessions": None,
        }
