# expect: column 'prompt' must be Text, Messages, Json, PerSequence, Image or list[Image], not
from hflow import Dataset, Model, Recipe, nodes, use

data = Dataset(prompt=str)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
