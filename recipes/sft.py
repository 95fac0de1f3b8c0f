"""Supervised fine-tuning on prompts and answers, with an evaluation of greedy answers.

    hflow run recipes/sft.py

The model learns to add two-digit numbers from written examples. Expect the loss to fall at once, and the
held-out accuracy (`eval_gen/accuracy`, every 50 steps) to leave 0 after about 150 steps and to reach 0.30 to
0.56 after 300.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "sft",
    data,
    [
        use(nodes.sft_view, actor),
        use(nodes.sft_train, actor),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=50, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
