# expect: score(state): State is not provided here
from hflow import Dataset, Model, Recipe, State, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample")
def score(num_tokens: int, state: State) -> float:
    return 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
