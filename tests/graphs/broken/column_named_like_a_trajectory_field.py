# expect: column 'completion' has the name of a trajectory's field
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, completion=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
