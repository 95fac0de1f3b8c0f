# expect: game: a list of trajectories is for episodes of one model. Return one Trajectory for each model
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text)
black, white = Model("black", trainable=True), Model("white", trainable=True)


@generate(black, white, group=4)
async def game(black: Engine, white: Engine, prompt: str) -> list[Trajectory]:
    return [await black.complete(prompt), await white.complete(prompt)]


recipe = Recipe("broken", data, [game])
