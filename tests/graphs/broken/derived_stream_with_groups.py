# expect: critique: a stream that derives from another has the same samples. Remove group=
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, on="actor_gen", group=4)
async def critique(engine: Engine, completion: str) -> Trajectory:
    return await engine.complete(completion)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), critique])
