# expect: ema: the node has no model yet. List use(ema, MODEL) instead
from hflow import Dataset, Model, Recipe, Tensor, Text, nodes, update, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@update(actor)
def ema(target: Tensor, source: Tensor) -> Tensor:
    return target.lerp(source, 0.1)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), ema])
