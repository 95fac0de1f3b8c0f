# expect: actor_train: knob clip is 'low'; it must be float
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.actor_train, actor, clip="low")])
