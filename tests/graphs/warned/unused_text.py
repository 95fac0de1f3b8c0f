# expect: shout: no node reads 'shout'
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def shout(completion: str) -> str:
    return completion.upper()


recipe = Recipe("warned", data, [use(nodes.actor_gen, actor), shout])
