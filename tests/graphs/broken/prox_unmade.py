# expect: drift(prox_logprobs): no node or dataset column produces 'prox_logprobs'; did you mean
from hflow import Dataset, Model, PerToken, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(returns="token_reward")
def drift(prox_logprobs: PerToken, behav_logprobs: PerToken) -> PerToken:
    return prox_logprobs - behav_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), drift])
