# expect: actor_gen: top_p is 0; it must be more than 0 and at most 1
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2, top_p=0.0)])
