# expect: actor_train: its first pass scaled reads 'advantages', which its body does not read in the same way.
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, first_pass, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


def scaled(logprobs: PerToken, advantages: PerToken) -> PerToken:
    return advantages / logprobs.std()


@train(actor, reduce="token-mean")
@first_pass(scaled)
def actor_train(out: Output, scaled: PerToken) -> PerToken:
    return -out.logprobs * scaled


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
