# expect: result 'score' is set; here a result is str, float
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int) -> set:
    return {num_tokens}


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
