# expect: game: routing_replay is for episodes of one model, but it has alice, bob. Remove routing_replay
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate

data = Dataset(prompt=Text, answer=Text)
alice = Model("alice", trainable=True)
bob = Model("bob")


@generate(alice, bob, returns=("one", "two"), routing_replay=True)
async def game(alice: Engine, bob: Engine, prompt: str) -> tuple[Trajectory, Trajectory]:
    return await alice.complete(prompt), await bob.complete(prompt)


recipe = Recipe("broken", data, [game])
