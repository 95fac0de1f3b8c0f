# expect: right: 'keep' decides about one sample or group. Set per='sample' or per='group'
from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@compute(returns="keep")
def right(reward: PerSequence) -> PerSequence:
    return reward > 0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score, right])
