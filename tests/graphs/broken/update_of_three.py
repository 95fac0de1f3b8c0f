# expect: mix: the body of @update takes two Tensors before '*', target and source, not 3
from hflow import Dataset, Model, Recipe, Tensor, Text, nodes, update, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@update(actor, source=actor)
def mix(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a + b + c


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), mix])
