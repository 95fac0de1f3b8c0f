# expect: score: returns=('a', 'a') has the same name twice. Give each field its own name
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns=("a", "a"))
def score(num_tokens: int) -> tuple[float, float]:
    return 0.0, 0.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), score])
