# expect: scored: it reads groups, but runs on single samples. Set per='group'
from hflow import Dataset, Model, Output, PerSequence, Recipe, Sequences, Text, compute, infer, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="score")


@infer(rm, per="sample")
def scored(out: Output, seqs: Sequences) -> PerSequence:
    return out.scores - seqs.group_sum(out.scores)[seqs.group]


@compute(per="sample", returns="keep")
def good(scored: float) -> bool:
    return scored > 0


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), scored, good])
