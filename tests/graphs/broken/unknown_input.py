# expect: score(complation): no node or dataset column produces 'complation'; did you mean 'completion'?
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(complation: str, answer: str) -> float:
    return float(complation == answer)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
