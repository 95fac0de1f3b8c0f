# expect: Dataset('train') has no columns. Declare at least one, such as prompt=Text
from hflow import Dataset, Model, Recipe, nodes, use

data = Dataset()
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
