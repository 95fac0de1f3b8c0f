# expect: actor_gen: the recipe's dataset feeds this stream in every step. Remove every= and after=; they are
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, every=2)])
