# expect: actor_train: its body must read what its first pass returns. Add a parameter 'likely' of that type
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, first_pass, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


def likely(logprobs: PerToken) -> PerToken:
    return logprobs > logprobs.mean()


@train(actor, reduce="token-mean")
@first_pass(likely)
def actor_train(out: Output) -> PerToken:
    return -out.logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
