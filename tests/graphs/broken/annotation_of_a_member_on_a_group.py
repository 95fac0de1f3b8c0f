# expect: score(completion): the annotation str does not fit here. Use a list over the members, such as
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="group")
def score(completion: str) -> float:
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
