# expect: score(engine): Engine is not provided here
from hflow import Dataset, Engine, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(engine: Engine) -> float:
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
