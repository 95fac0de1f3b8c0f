# expect: actor_gen: the function must return one or more Trajectory first, then its fields
from hflow import Dataset, Engine, Model, Recipe, Text, generate

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor)
async def actor_gen(engine: Engine, prompt: str) -> str:
    return (await engine.complete(prompt)).reply


recipe = Recipe("broken", data, [actor_gen])
