# expect: actor_inf: it computes prox_logprobs with model 'ref', but actor_train on the same stream trains
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "broken",
    data,
    [
        use(nodes.actor_gen, actor, group=2),
        score,
        nodes.group_advantage,
        use(nodes.actor_inf, ref),
        use(nodes.actor_train, actor),
    ],
)
