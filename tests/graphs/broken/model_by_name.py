# expect: infer: @infer takes Model(...) objects, not 'actor'
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, infer, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@infer("actor")
def score(out: Output) -> PerToken:
    return out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
