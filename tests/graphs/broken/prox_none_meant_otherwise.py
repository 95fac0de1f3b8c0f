# expect: drift(prox_logprobs): prox_logprobs do not exist, because actor_train has prox='none'. Set
from hflow import Dataset, Model, PerToken, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@compute(returns="token_reward")
def drift(prox_logprobs: PerToken, behav_logprobs: PerToken) -> PerToken:
    return prox_logprobs - behav_logprobs


recipe = Recipe(
    "broken",
    data,
    [
        use(nodes.actor_gen, actor, group=2),
        score,
        drift,
        nodes.group_advantage,
        use(nodes.actor_inf, actor),
        use(nodes.actor_train, actor, prox="none"),
    ],
)
