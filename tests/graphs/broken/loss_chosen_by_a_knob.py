# expect: actor_train: there is no option or knob 'loss', as every loss is a node. In the place of
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)

recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.actor_train, actor, loss="cispo")])
