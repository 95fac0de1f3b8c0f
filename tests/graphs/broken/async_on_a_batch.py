# expect: score: only bodies of generate, and of compute with per='sample' or per='group', may be 'async def'
from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute()
async def score(num_tokens: PerSequence) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
