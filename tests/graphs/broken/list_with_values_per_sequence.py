# expect: total: an infer node can only return PerToken there. Reduce it in a compute node
from hflow import (
    Dataset,
    Engine,
    Model,
    Output,
    PerSequence,
    Recipe,
    Sequences,
    Text,
    Trajectory,
    generate,
    infer,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4)
async def agent(engine: Engine, prompt: str) -> list[Trajectory]:
    return [await engine.complete(prompt)]


@infer(actor)
def total(out: Output, seqs: Sequences) -> PerSequence:
    return seqs.sum(out.logprobs)


recipe = Recipe("broken", data, [agent, total])
