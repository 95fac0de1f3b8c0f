# expect: actor_gen: sft_train trains on its samples, so temperature must be above 0
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, temperature=0.0), use(nodes.sft_train, actor)])
