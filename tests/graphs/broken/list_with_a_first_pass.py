# expect: clip_cov_train: a first pass is for single trajectories. Use another train node
from hflow import (
    Dataset,
    Engine,
    Model,
    Recipe,
    Text,
    Trajectory,
    compute,
    generate,
    nodes,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4)
async def agent(engine: Engine, prompt: str) -> list[Trajectory]:
    return [await engine.complete(prompt)]


@compute(per="sample")
def reward(completion: str) -> float:
    return 1.0


recipe = Recipe("broken", data, [agent, reward, nodes.group_advantage, use(nodes.clip_cov_train, actor)])
