# expect: compute: option retries is 'many'; it must be None or int
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", retries="many")
def score(num_tokens: int) -> float:
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
