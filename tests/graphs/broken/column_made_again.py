# expect: answer: the dataset or the trajectory of actor_gen already produces field 'answer' of stream
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def answer(completion: str) -> str:
    return completion


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), answer])
