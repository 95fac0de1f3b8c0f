"""GRPO on an environment of OpenEnv, unchanged: a tiny model with random weights crosses a grid.

    hflow run environments/grid_world nodes.openenv.python=PATH

The interpreter at PATH, of Python 3.12, has `openenv>=0.10,<0.11` and the directory `envs/grid_world_env` of
https://github.com/meta-pytorch/OpenEnv, installed with `pip install --no-deps`, as it names an older
`openenv-core`. The grid has 5 x 5 cells. The model reads its cell as two digits, and replies with a
digit, whose remainder by 4 is a direction: see `grid_world_text.py`. The environment's rewards are 1 at the
goal and -0.1 elsewhere: 0.3 in sum for the shortest way, and -2 if 20 steps do not lead there.
"""

from collections.abc import Iterator
from pathlib import Path

from hflow import Dataset, Model, PerSequence, Recipe, compute, nodes, rows, use

data = Dataset("train", seed=PerSequence)
heldout = Dataset("heldout", seed=PerSequence)
actor = Model("actor", trainable=True)
TEXT = Path(__file__).with_name("grid_world_text.py")
GAME = use(nodes.openenv, actor, max_steps=20, render=f"{TEXT}:cell", parse=f"{TEXT}:move")


@rows
def seeds(split: str) -> Iterator[dict[str, int]]:
    for seed in range(1_000_000):
        yield {"seed": seed}


@compute(per="sample", returns=("score", "goal"))
def judge(reward: float, num_steps: int, num_unreadable: int) -> tuple[float, float]:
    """Return the reward, less 0.2 for each reply that is no digit, and 1 if the goal was reached."""
    return reward - 0.2 * num_unreadable, float(reward > 0.5 - 0.1 * num_steps)


recipe = Recipe(
    "grid_world",
    data,
    [
        use(GAME, group=8),
        use(judge, on="openenv"),
        use(nodes.group_advantage, on="openenv", reads={"reward": "score"}),
        use(nodes.actor_train, actor, on="openenv", prox="none", entropy_coef=0.01),
        use(GAME, name="eval_game", data=heldout, every=10, temperature=0.0),
        use(judge, name="judge_eval", on="eval_game"),
    ],
)
