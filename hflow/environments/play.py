"""`play`: a model plays an environment whose observations and actions are texts, in one conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hflow.environments.client import open_environment
from hflow.types import Engine, Trajectory


@dataclass(frozen=True)
class Played:
    """A conversation with an environment that has ended."""

    talk: Trajectory
    rewards: tuple[float, ...]
    """The environment's rewards, in order. Steps without one are left out."""
    num_steps: int
    """Steps of the environment."""
    num_unreadable: int
    """Replies without an action."""


async def play(engine: Engine, max_steps: int, **opening: Any) -> Played:
    """Open an environment by `open_environment`, and send it at most `max_steps` replies until it ends.

    Its session has the methods `message()`, the first message, and `step(reply)`, which returns `message`,
    `reward` (None: there is none), `is_end` and `is_action`.
    """
    game: Any = await engine.environment(open_environment, **opening)
    first = await engine.call(game.call, method="message")
    talk = await engine.complete([{"role": "user", "content": first}])
    rewards: list[float] = []
    num_steps, num_unreadable = 0, 0
    for reply in range(1, max_steps + 1):
        turn = await engine.call(game.call, method="step", reply=talk.completion)
        rewards += [] if turn["reward"] is None else [turn["reward"]]
        num_steps += turn["is_action"]
        num_unreadable += not turn["is_action"]
        if turn["is_end"] or reply == max_steps:
            break
        talk = await engine.complete(talk.add("user", turn["message"]))
    return Played(talk, tuple(rewards), num_steps, num_unreadable)
