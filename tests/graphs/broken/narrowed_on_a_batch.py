# expect: produces PerToken. Reduce it in a compute node with seqs.sum, seqs.mean or seqs.members
from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute()
def mean_value(behav_logprobs: PerSequence) -> PerSequence:
    return behav_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), mean_value])
