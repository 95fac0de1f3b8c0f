# expect: agent: hflow makes the fields 'trajectory' and 'trajectories' of episodes that return a list. Rename
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4, returns=("trajectory", "trajectories"))
async def agent(engine: Engine, prompt: str) -> tuple[Trajectory, list[int], list[dict]]:
    return await engine.complete(prompt), [0], [{}]


recipe = Recipe("broken", data, [agent])
