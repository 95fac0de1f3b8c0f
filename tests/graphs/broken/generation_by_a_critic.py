# expect: actor_gen: model 'critic' has head='value', but generation needs head='lm'
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
critic = Model("critic", head="value")


recipe = Recipe("broken", data, [use(nodes.actor_gen, critic)])
