# expect: module 'hflow.nodes' has no attribute 'group_advantag'; did you mean 'group_advantage'?
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2), nodes.group_advantag])
