# expect: verb 'train' is taken by hflow.dsl.verbs; set another
from hflow import Dataset, Model, NodeType, Recipe, Text, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Train(NodeType):
    pass


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
