# expect: close: 'keep' depends on drift and runs after the batch is complete, when no sample can be left out
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


@compute(per="sample")
def drift(ref_logprobs: list[float]) -> float:
    return sum(ref_logprobs)


@compute(per="sample", returns="keep")
def close(drift: float) -> bool:
    return drift > -10.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.ref_inf, ref), drift, close])
