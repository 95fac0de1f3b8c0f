# expect: game: the function returns 2 trajectories. Name each of them in returns=
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor)
async def game(engine: Engine, prompt: str) -> tuple[Trajectory, Trajectory]:
    talk = await engine.complete(prompt)
    return talk, talk


recipe = Recipe("broken", data, [game])
