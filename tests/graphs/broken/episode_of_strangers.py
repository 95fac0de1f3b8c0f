# expect: game: with several models, the body needs one Engine parameter named after each model. The models
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
bob = Model("bob")


@generate(actor, bob, returns=("one", "two"))
async def game(alice: Engine, bob: Engine, prompt: str) -> tuple[Trajectory, Trajectory]:
    return await alice.complete(prompt), await bob.complete(prompt)


recipe = Recipe("broken", data, [game])
