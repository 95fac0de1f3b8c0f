# expect: Train: verb 'train' is already used by hflow.dsl.verbs. Set another name with verb=
from hflow import Dataset, Model, Recipe, Text, nodes, use
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Train(NodeType):
    pass


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor)])
