# expect: actor_train(behav_logprobs): actor_gen samples with top_p, top_k or min_p: behav_logprobs are not
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "warned",
    data,
    [
        use(nodes.actor_gen, actor, group=2, top_p=0.9, sampling_replay=False),
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor),
    ],
)
