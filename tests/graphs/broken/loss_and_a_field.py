# expect: actor_train: the body of @train must return one loss, or one loss and Metrics
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, reduce="token-mean")
def actor_train(out: Output) -> tuple[PerToken, PerToken]:
    return -out.logprobs, out.entropy


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
