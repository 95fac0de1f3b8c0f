# expect: a cycle within a step:
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def early(late: float) -> float:
    return late


@compute(per="sample")
def late(early: float) -> float:
    return early


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), early, late])
