# expect: field 'answer' of stream 'actor_gen' is already made by the dataset
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def answer(completion: str) -> str:
    return completion


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), answer])
