# expect: actor_gen makes groups of 1: set group=2 there, or min_group=1 here
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@compute(per="group")
def spread(reward: list[float]) -> float:
    return max(reward) - min(reward)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score, spread])
