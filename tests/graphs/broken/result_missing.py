# expect: score: the function returns nothing. Return a field or Metrics
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int) -> None:
    return None


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
