# expect: actor_gen(completion): no node or dataset column produces 'completion'; did you mean 'prompt'?
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor)
async def actor_gen(engine: Engine, completion: str) -> Trajectory:
    return await engine.complete(completion)


recipe = Recipe("broken", data, [actor_gen])
