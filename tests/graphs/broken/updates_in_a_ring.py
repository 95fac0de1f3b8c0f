# expect: a cycle within a step:
from hflow import Dataset, Model, Recipe, Tensor, Text, nodes, update, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
other = Model("other", trainable=True)


@update(actor, source=other)
def forth(target: Tensor, source: Tensor) -> Tensor:
    return target.lerp(source, 0.5)


@update(other, source=actor)
def back(target: Tensor, source: Tensor) -> Tensor:
    return target.lerp(source, 0.5)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), forth, back])
