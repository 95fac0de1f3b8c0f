"""Only episodes that return a list have fields that hflow makes of it."""

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

data = Dataset(prompt=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4, returns="trajectory")
async def agent(engine: Engine, prompt: str) -> tuple[Trajectory, dict]:
    return await engine.complete(prompt), {"moves": 3}


@compute(per="sample")
def reward(trajectory: dict) -> float:
    return float(trajectory["moves"])


recipe = Recipe("good", data, [agent, reward, nodes.group_advantage, use(nodes.actor_train, actor)])
