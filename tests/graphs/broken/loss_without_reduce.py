# expect: actor_train: reduce= is not set. For a PerToken loss, set it to token-mean, seq-mean-token-sum,
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor)
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
