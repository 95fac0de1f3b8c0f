# expect: score: the recipe's dataset feeds several streams (actor_gen, other_gen). Choose one with on=
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "broken", data, [use(nodes.actor_gen, actor), use(nodes.actor_gen, actor, name="other_gen"), score]
)
