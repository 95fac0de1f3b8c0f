# expect: score: the function has no result annotation. Add one after '->'
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(completion: str):
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
