# expect: audit: layout('audit') must return 'sharded' or 'single', not 'striped'
from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, use
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Striped(NodeType):
    def layout(self, field):
        return "striped"


@Striped()
def audit(num_tokens: PerSequence) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), audit])
