# expect: actor_train: reduce='token-sum/N' does not fit. For a PerToken loss, set it to token-mean,
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, reduce="token-sum/N")
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
