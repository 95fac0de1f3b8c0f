# expect: actor_train: it has no reduce=: a PerToken loss is reduced by token-mean or seq-mean-token-sum
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor)
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
