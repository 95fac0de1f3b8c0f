# expect: score: backoff has no effect with retries=0. Remove one of them
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", retries=0, backoff=3.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2), score])
