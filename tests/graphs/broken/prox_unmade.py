# expect: drift(prox_logprobs): nobody produces 'prox_logprobs'
from hflow import Dataset, Model, PerToken, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(returns="token_reward")
def drift(prox_logprobs: PerToken, behav_logprobs: PerToken) -> PerToken:
    return prox_logprobs - behav_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), drift])
