# expect: actor_gen: stop has an empty text, which would end every completion at once
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2, stop=("\n", ""))])
