# expect: score: the body of @infer needs a parameter annotated with Output. Add one
from hflow import Dataset, Model, PerToken, Recipe, Text, infer, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@infer(actor)
def score(behav_logprobs: PerToken) -> PerToken:
    return behav_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
