# expect: 'prompt' is read as Text, but the dataset has Json. Annotate the parameter with dict or list
from hflow import Dataset, Json, Model, Recipe, nodes, use

data = Dataset(prompt=Json)
actor = Model("actor", trainable=True)
recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
