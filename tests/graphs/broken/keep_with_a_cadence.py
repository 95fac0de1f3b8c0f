# expect: short: 'keep' has every= or after= and runs after the batch is complete, when no sample can be left
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="keep", every=2)
def short(num_tokens: int) -> bool:
    return num_tokens < 10


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), short])
