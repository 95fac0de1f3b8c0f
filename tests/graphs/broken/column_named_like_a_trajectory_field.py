# expect: column 'completion' has the name of a trajectory field. Rename the column
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, completion=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
