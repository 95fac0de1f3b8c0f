# expect: right: 'keep' must be bool, not float
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="keep")
def right(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), right])
