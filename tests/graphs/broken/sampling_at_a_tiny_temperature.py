# expect: actor_gen: temperature is 1e-300; it must be from 0.01 to 100, or 0
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2, temperature=1e-300)])
