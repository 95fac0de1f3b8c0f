# expect: critic_inf: a model with head='value' has no values or scores of episodes yet. Remove this node
from hflow import (
    Dataset,
    Engine,
    Model,
    Recipe,
    Text,
    Trajectory,
    generate,
    nodes,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True)


@generate(actor, group=4)
async def agent(engine: Engine, prompt: str) -> list[Trajectory]:
    return [await engine.complete(prompt)]


recipe = Recipe("broken", data, [agent, use(nodes.critic_inf, critic)])
