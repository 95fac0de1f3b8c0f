# expect: a cycle within a step: it reads 'total', which it returns itself
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def total(total: float) -> float:
    return total


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), total])
