# expect: centred: it needs at least 2 samples per prompt, but actor_gen has group=1. Set group=2 there, or
from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@compute()
def centred(reward: PerSequence, group: PerSequence) -> PerSequence:
    return reward - reward[group == group[0]].mean()


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score, centred])
