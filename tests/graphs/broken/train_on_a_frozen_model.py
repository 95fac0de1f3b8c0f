# expect: actor_train: it writes model 'actor', which is frozen. Declare Model('actor', trainable=True) at
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor")


@train(actor, reduce="token-mean")
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
