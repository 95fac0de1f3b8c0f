# expect: again: data= opens a new stream, on= derives one from another stream. Remove one of them
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "broken",
    data,
    [use(nodes.actor_gen, actor), use(nodes.actor_gen, actor, name="again", on="actor_gen", data=data)],
)
