# expect: Model('actor') is also declared at
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
other = Model("actor")


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.ref_inf, other)])
