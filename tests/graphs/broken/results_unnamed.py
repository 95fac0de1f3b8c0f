# expect: score: the function returns 2 field(s), but returns= names 0. Name them all
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int) -> tuple[float, float]:
    return 0.0, 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
