"""GRPO on Blackjack of the package `gymnasium`, unchanged: a tiny model without any training learns to play.

    pip install 'hflow-rl[gymnasium]'
    hflow run environments/blackjack

`nodes.gymnasium.python=PATH` runs the game in another interpreter, which has gymnasium. The model reads an
observation, such as `14, 10, 0`, and replies `1` to take a card or `0` to stop. A reply that is neither costs
a quarter. Every row of the dataset is a seed: all episodes of a group play the same cards, and those that are
held out are never trained on.
"""

from collections.abc import Iterator

from hflow import Dataset, Model, PerSequence, Recipe, compute, nodes, rows, use

data = Dataset("train", seed=PerSequence)
heldout = Dataset("heldout", seed=PerSequence)
actor = Model("actor", trainable=True)


@rows
def seeds(split: str) -> Iterator[dict[str, int]]:
    first = {"train": 0, "heldout": 1_000_000}[split]
    for number in range(1_000_000):
        yield {"seed": first + number}


@compute(per="sample")
def score(reward: float, num_unreadable: int) -> float:
    return reward - 0.25 * num_unreadable


recipe = Recipe(
    "blackjack",
    data,
    [
        use(nodes.gymnasium, actor, id="Blackjack-v1", group=8),
        score,
        use(nodes.group_advantage, reads={"reward": "score"}),
        use(nodes.actor_train, actor, prox="none", entropy_coef=0.01),
        use(
            nodes.gymnasium,
            actor,
            name="eval_game",
            id="Blackjack-v1",
            data=heldout,
            every=20,
            temperature=0.0,
        ),
    ],
)
