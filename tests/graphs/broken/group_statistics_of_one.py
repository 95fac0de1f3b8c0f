# expect: group_advantage: it needs groups of 2 or more, but actor_gen makes groups of 1
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score, nodes.group_advantage])
