"""GRPO: eight answers a prompt, an exact-match reward, advantages relative to the group.

    hflow run recipes/grpo.py

The held-out accuracy (`eval_gen/accuracy`) rises from the starting checkpoint's; the share of
right answers among the samples (`actor_gen/reward`) rises with it. With `max_staleness=0` and
`prox="none"` the loss is plain clipped PPO.
"""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


recipe = Recipe(
    "grpo",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
