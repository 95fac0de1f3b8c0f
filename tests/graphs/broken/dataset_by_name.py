# expect: generate: data= must be a Dataset, not 'heldout'
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, data="heldout")])
