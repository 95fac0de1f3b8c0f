"""Supervised fine-tuning of a tiny model that sees: questions about drawn shapes, from random weights.

    hflow run recipes/vision_sft.py

Expect the loss to fall from 3.9 to 0.4, and the held-out accuracy (`eval_gen/accuracy`, every 20 steps) to
reach about 0.70 after 120 steps. `recipes/vision.py` continues from there.
"""

from hflow import Dataset, Image, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", images=list[Image], prompt=Text, answer=Text)
heldout = Dataset("heldout", images=list[Image], prompt=Text, answer=Text)
actor = Model("actor", trainable=True, vision=True)

recipe = Recipe(
    "vision_sft",
    data,
    [
        use(nodes.sft_view, actor),
        use(nodes.sft_train, actor),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
