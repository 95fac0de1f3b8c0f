# expect: ema: it writes model 'ref', which is frozen
from hflow import Dataset, Model, Recipe, Tensor, Text, nodes, update, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


@update(ref, source=actor)
def ema(ref: Tensor, actor: Tensor) -> Tensor:
    return ref.lerp(actor, 0.01)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), ema])
