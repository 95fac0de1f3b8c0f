r"""GRPO of Qwen2.5-VL-7B-Instruct on Geometry3K: questions about drawings, eight answers to each.

    hflow run recipes/geometry3k/grpo.py

The reward is 1 if the last `\boxed{...}` of an answer equals the solution as mathematics. The test split is
answered greedily every 20 steps (`eval_gen/accuracy`). Language model and tower are trained;
`models.actor.freeze=vision` leaves the tower as it is.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use
from hflow.types import Image

data = Dataset("train", images=list[Image], prompt=Text, answer=Text)
heldout = Dataset("heldout", images=list[Image], prompt=Text, answer=Text)
actor = Model("actor", trainable=True, vision=True)

recipe = Recipe(
    "geometry3k_grpo",
    data,
    [
        use(nodes.chat_gen, actor, group=8),
        use(rewards.math, returns="reward", boxed=True),
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=4, prox="recompute", over_cap="truncate"),
        use(nodes.chat_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.math, name="accuracy", on="eval_gen", returns="accuracy", boxed=True),
    ],
)
