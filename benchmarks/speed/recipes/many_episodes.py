"""1,000 episodes of a Gymnasium environment at a time, which measure how late their event loop is.

    hflow run benchmarks/speed/recipes/many_episodes.py nodes.play.python=PATH

PATH is an interpreter with gymnasium. Results: `time/step_seconds`, and the metrics of `measured`.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

from hflow import (
    Dataset,
    Engine,
    Metrics,
    Model,
    PerSequence,
    Recipe,
    Trajectory,
    compute,
    generate,
    nodes,
    rows,
    use,
)
from hflow.environments.client import open_environment

data = Dataset("train", seed=PerSequence)
actor = Model("actor", trainable=True)
LAKE = {"desc": ["SFF", "FHF", "FFG"], "is_slippery": False}


@rows
def seeds() -> Iterator[dict[str, int]]:
    for number in range(1_000_000):
        yield {"seed": number}


@generate(actor, group=8, max_tokens=1, returns=("reward", "opening", "step", "late"))
async def play(
    engine: Engine, seed: int, *, python: str | None = None, max_steps: int = 8
) -> tuple[Trajectory, float, float, float, float]:
    """Return the game, its reward, and the seconds of its opening, slowest step and latest wake-up."""
    settings = {"id": "FrozenLake-v1", "options": json.dumps(LAKE), "render": "observation", "python": python}
    started = time.perf_counter()
    game: Any = await engine.environment(
        open_environment,
        adapter="gymnasium",
        settings=settings,
        arguments={"seed": seed, "instructions": "?"},
    )
    opening = time.perf_counter() - started
    talk = await engine.complete(
        [{"role": "user", "content": await engine.call(game.call, method="message")}]
    )
    reward, step, late = 0.0, 0.0, 0.0
    for _ in range(max_steps):
        started = time.perf_counter()
        turn = await engine.call(game.call, method="step", reply=talk.completion)
        step = max(step, time.perf_counter() - started)
        started = time.perf_counter()
        await asyncio.sleep(0.1)
        late = max(late, time.perf_counter() - started - 0.1)
        reward += turn["reward"]
        if turn["is_end"]:
            break
        talk = await engine.complete(talk.add("user", turn["message"]))
    return talk, reward, opening, step, late


@compute(per="batch")
def measured(opening: PerSequence, step: PerSequence, late: PerSequence) -> Metrics:
    """Return percentiles over the episodes of a batch."""
    return {
        f"{name}_{percent}": values.quantile(percent / 100)
        for name, values in (("opening", opening), ("step", step), ("late", late))
        for percent in (50, 99, 100)
    }


recipe = Recipe(
    "many_episodes", data, [play, measured, nodes.group_advantage, use(nodes.actor_train, actor, prox="none")]
)
