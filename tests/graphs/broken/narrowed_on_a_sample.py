# expect: produces PerToken. Annotate the parameter with a list
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def confidence(behav_logprobs: float) -> float:
    return behav_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), confidence])
