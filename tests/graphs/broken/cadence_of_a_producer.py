# expect: kl(ref_logprobs): ref_inf produces 'ref_logprobs' every 10 step(s) after step 0, but it is read
from hflow import Dataset, Model, PerToken, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


@compute()
def kl(behav_logprobs: PerToken, ref_logprobs: PerToken) -> PerToken:
    return behav_logprobs - ref_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.ref_inf, ref, every=10), kl])
