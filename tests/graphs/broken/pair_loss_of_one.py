# expect: pairs: it needs at least 2 samples per prompt, but sft_view has group=1. Set group=2 there, or
from hflow import Dataset, Model, Output, PerGroup, Recipe, Sequences, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, reduce="group-mean")
def pairs(out: Output, seqs: Sequences) -> PerGroup:
    chosen, rejected = seqs.members(seqs.sum(out.logprobs))
    return rejected - chosen


recipe = Recipe("broken", data, [use(nodes.sft_view, actor), pairs])
