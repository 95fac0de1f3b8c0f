# expect: judge: 'judge' runs like compute, which cannot use model 'actor'. Derive its class from infer
from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, use
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Judge(NodeType):
    pass


@Judge(actor)
def judge(num_tokens: PerSequence) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), judge])
