# expect: score(rest): *args and **kwargs are not allowed: every parameter is an edge or a knob. Name it
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int, *rest: int) -> float:
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
