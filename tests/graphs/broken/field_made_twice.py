# expect: already produces field 'reward' of stream 'actor_gen'. Rename one with returns=
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@compute(per="sample", returns="reward")
def bonus(num_tokens: int) -> float:
    return 1.0 / num_tokens


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score, bonus])
