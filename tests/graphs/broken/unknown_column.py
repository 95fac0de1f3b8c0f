# expect: actor_gen(promt): no node or dataset column produces 'promt'; did you mean 'prompt'?
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor)
async def actor_gen(engine: Engine, promt: str) -> Trajectory:
    return await engine.complete(promt)


recipe = Recipe("broken", data, [actor_gen])
