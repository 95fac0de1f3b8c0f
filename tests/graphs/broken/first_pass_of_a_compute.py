# expect: halved: @first_pass is for train nodes, and this is @compute. Remove it
from hflow import Dataset, Model, PerSequence, PerToken, Recipe, Text, compute, first_pass, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


def likely(logprobs: PerToken) -> PerToken:
    return logprobs > logprobs.mean()


@compute(returns="reward")
@first_pass(likely)
def halved(num_tokens: PerSequence, likely: PerToken) -> PerSequence:
    return num_tokens / 2


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), halved])
