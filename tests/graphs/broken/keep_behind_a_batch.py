# expect: close: 'keep' depends on ref_inf and runs after the batch is complete, when no sample can be left
from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref")


@compute(per="sample", returns="keep")
def close(ref_logprobs: list[float]) -> bool:
    return min(ref_logprobs) > -10.0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), use(nodes.ref_inf, ref), close])
