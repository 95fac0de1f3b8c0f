# expect: old: it returns prox_logprobs, but only prox='recompute' of actor_train decides where they come
from hflow import Dataset, Model, PerToken, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@compute(returns="prox_logprobs")
def old(behav_logprobs: PerToken) -> PerToken:
    return behav_logprobs


recipe = Recipe(
    "broken",
    data,
    [use(nodes.actor_gen, actor, group=2), score, nodes.group_advantage, old, use(nodes.actor_train, actor)],
)
