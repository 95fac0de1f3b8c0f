# expect: dpo: a loss per group compares sequences, not episodes. Return a loss PerToken or PerSequence
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
ref = Model("ref")


@generate(actor, group=4)
async def agent(engine: Engine, prompt: str) -> list[Trajectory]:
    return [await engine.complete(prompt)]


recipe = Recipe("broken", data, [agent, use(nodes.ref_inf, ref), use(nodes.dpo, actor)])
