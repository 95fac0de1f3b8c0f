# expect: audit: run of Audit is 'async def', which only kinds like generate
from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, use
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Audit(NodeType):
    async def run(self, context, inputs):
        return inputs


@Audit()
def audit(num_tokens: PerSequence) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), audit])
