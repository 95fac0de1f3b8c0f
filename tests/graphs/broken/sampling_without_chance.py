# expect: actor_gen: top_k has no effect with temperature=0, which takes the most likely token
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2, temperature=0.0, top_k=5)])
