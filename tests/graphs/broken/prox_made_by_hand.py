# expect: old: it makes prox_logprobs, but prox='recompute' of actor_train alone decides where they come from
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
