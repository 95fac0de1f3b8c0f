# expect: halved: timeout has no effect, as its body runs once on the whole batch
from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(timeout=3.0)
def halved(num_tokens: PerSequence) -> PerSequence:
    return num_tokens / 2


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor, group=2), halved])
