# expect: actor_inf: the node has no model yet. List use(actor_inf, MODEL) instead
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), nodes.actor_inf])
