# expect: judge: a stream that derives from another has one trajectory per sample. Return a Trajectory; judge
from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, generate, nodes, use

data = Dataset(prompt=Text)
actor = Model("actor", trainable=True)


@generate(actor, on="actor_gen")
async def judge(engine: Engine, completion: str) -> list[Trajectory]:
    return [await engine.complete(completion)]


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), judge])
