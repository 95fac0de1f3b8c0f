"""Supervised fine-tuning on prompts and answers, with the accuracy of greedy answers beside it.

    hflow run recipes/sft.py

Expect the loss to fall at once, and the held-out accuracy (`eval_gen/accuracy`, every 50 steps) to
leave 0 after some 150 steps of two-digit addition and to reach about 0.5 after 300.
"""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", on="eval_gen")
def accuracy(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


recipe = Recipe(
    "sft",
    data,
    [
        use(nodes.sft_view, actor),
        use(nodes.sft_train, actor),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=50, temperature=0.0),
        accuracy,
    ],
)
