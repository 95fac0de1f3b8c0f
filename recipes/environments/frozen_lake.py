"""GRPO on FrozenLake of the package `gymnasium`: a tiny model with random weights crosses the lake.

    pip install 'hflow-rl[gymnasium]'
    hflow run environments/frozen_lake

`nodes.gymnasium.python=PATH` runs the game in another interpreter, which has gymnasium. The model reads the
number of its field and replies with one of the four directions, `0` to `3`. The environment's reward is 1 at
the goal. A reply that is no direction costs a tenth.
"""

from collections.abc import Iterator

from hflow import Dataset, Model, PerSequence, Recipe, compute, nodes, rows, use

data = Dataset("train", seed=PerSequence)
heldout = Dataset("heldout", seed=PerSequence)
actor = Model("actor", trainable=True)
GAME = use(nodes.gymnasium, actor, id="FrozenLake-v1", render="observation", max_steps=8)


@rows
def seeds(split: str) -> Iterator[dict[str, int]]:
    first = {"train": 0, "heldout": 1_000_000}[split]
    for number in range(1_000_000):
        yield {"seed": first + number}


@compute(per="sample")
def score(reward: float, num_unreadable: int) -> float:
    return reward - 0.1 * num_unreadable


recipe = Recipe(
    "frozen_lake",
    data,
    [
        use(GAME, group=8),
        score,
        use(nodes.group_advantage, reads={"reward": "score"}),
        use(nodes.actor_train, actor, prox="none", entropy_coef=0.01),
        use(GAME, name="eval_game", data=heldout, every=10, temperature=0.0),
    ],
)
