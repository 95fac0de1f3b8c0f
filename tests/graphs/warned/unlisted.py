# expect: score: no recipe in this file lists the node
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe("warned", data, [use(nodes.actor_gen, actor)])
