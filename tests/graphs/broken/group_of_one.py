# expect: spread: it needs at least 2 samples per prompt, but actor_gen has group=1. Set group=2 there, or
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
