# expect: Model('rm'): there is no head 'scores'; did you mean 'score'?
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="scores")


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
