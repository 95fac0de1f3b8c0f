# expect: audit: cost(shapes) must be affine in tokens, sequences and groups
from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, use
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Squared(NodeType):
    def cost(self, shapes):
        return shapes.tokens**2


@Squared()
def audit(num_tokens: PerSequence) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), audit])
