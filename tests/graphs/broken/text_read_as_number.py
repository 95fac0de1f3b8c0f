# expect: score(answer): 'answer' is read as PerSequence, but actor_gen produces Text
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(answer: float) -> float:
    return answer


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
