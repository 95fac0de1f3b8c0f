"""Rewards that batch nodes make: a model's score, and a body of samples behind it."""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text)
heldout = Dataset("heldout", prompt=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="score")


@compute(per="sample", returns="reward")
def total(rm_score: float, num_tokens: int, *, cost: float = 0.25) -> float:
    return rm_score - cost * num_tokens


recipe = Recipe(
    "judged",
    data,
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=4),
        use(nodes.rew_inf, rm, returns="rm_score"),
        total,
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=2, max_tokens=4),
        use(nodes.rew_inf, rm, name="eval_inf", on="eval_gen"),
    ],
)
