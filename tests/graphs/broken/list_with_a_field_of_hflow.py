# expect: agent: hflow makes the field 'trajectory' of episodes that return a list. Rename yours
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4, returns="trajectory")
async def agent(engine: Engine, prompt: str) -> tuple[list[Trajectory], float]:
    return [await engine.complete(prompt)], 1.0


recipe = Recipe("broken", data, [agent])
