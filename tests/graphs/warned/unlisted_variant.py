# expect: greedy: no recipe in this file lists the node
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
greedy = use(nodes.actor_gen, actor, name="greedy", temperature=0.0)


recipe = Recipe("warned", data, [use(nodes.actor_gen, actor)])
