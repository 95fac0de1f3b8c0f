"""`recipes/grpo_async.py` with a batch node that takes the trainer's device for a given time.

While it sleeps, the device's lane is taken and the core is free: what waits for it shows.
"""

import time

from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


@compute(per="batch", returns="advantages")
def pause(reward: PerSequence, *, seconds: float = 0.6) -> PerSequence:
    time.sleep(seconds)
    return reward


recipe = Recipe(
    "async_pause",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        score,
        pause,
        use(nodes.actor_train, actor, prox="loglinear"),
    ],
)
