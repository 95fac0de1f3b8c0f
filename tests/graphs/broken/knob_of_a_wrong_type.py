# expect: score(scales): knob of type bytes: a knob is int, float, bool, str
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int, *, scales: bytes = b"") -> float:
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
