# expect: the file has 2 recipes (broken, again). Keep one
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
again = Recipe("again", data, [])
