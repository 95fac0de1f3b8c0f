# expect: index: memory() must return a number of bytes, not -1
from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, use
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Index(NodeType):
    def memory(self):
        return -1


@Index()
def index(num_tokens: PerSequence) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), index])
