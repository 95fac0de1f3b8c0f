"""CISPO: the ratio is clipped as a weight, so that every token keeps a gradient.

    hflow run recipes/cispo.py

Starts from the checkpoint of `recipes/sft.py`, like `recipes/grpo.py`. PPO's clipping takes the gradient from
tokens whose ratio has left the range. In long reasoning these are often the rare tokens that change a train
of thought. CISPO clips the ratio without gradient, and multiplies it by `A log p`. Four updates per step make
the ratios differ from 1. `clip=1.0` sets no lower limit, as in the paper.

Source: MiniMax 2025, "MiniMax-M1", equations 4 and 5.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "cispo",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        use(rewards.exact, name="score", returns="reward"),
        nodes.group_advantage,
        use(nodes.cispo_train, actor, minibatches=4, prox="none", clip=1.0, clip_high=4.0),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
