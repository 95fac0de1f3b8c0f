# expect: score: the recipe's dataset feeds no stream. List a generate or encode node
from hflow import Dataset, Model, Recipe, Text, compute

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe("broken", data, [score])
