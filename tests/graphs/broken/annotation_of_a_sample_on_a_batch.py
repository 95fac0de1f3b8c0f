# expect: score(num_tokens): the annotation float does not fit here. Use PerToken, PerSequence, PerGroup,
from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute()
def score(num_tokens: float) -> PerSequence:
    return num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
