# expect: score: there is no stream 'actor_gne' for on=; did you mean 'actor_gen'?
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(score, on="actor_gne")])
