# expect: ZeroDivisionError: division by zero
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ratio = 1 / 0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
