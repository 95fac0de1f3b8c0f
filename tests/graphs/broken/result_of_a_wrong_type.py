# expect: score: result 'score' has the type set, but must be str, float, int, bool, list[float], list[int],
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int) -> set:
    return {num_tokens}


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
