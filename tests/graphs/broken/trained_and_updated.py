# expect: also writes model 'actor'. Only one node of a recipe may write a model
from hflow import Dataset, Model, Output, PerToken, Recipe, Tensor, Text, nodes, train, update, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
other = Model("other")


@train(actor, reduce="token-mean")
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


@update(actor, source=other)
def pull(actor: Tensor, other: Tensor) -> Tensor:
    return actor.lerp(other, 0.1)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train, pull])
