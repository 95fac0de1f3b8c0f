# expect: also writes model 'actor'. Only one node of a recipe may write a model
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, reduce="token-mean")
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train, use(nodes.sft_train, actor)])
