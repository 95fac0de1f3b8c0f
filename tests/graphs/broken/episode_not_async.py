# expect: actor_gen: the body of @generate must be asynchronous. Write 'async def'
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor)
def actor_gen(engine: Engine, prompt: str) -> Trajectory:
    return engine.complete(prompt)


recipe = Recipe("broken", data, [actor_gen])
