# expect: reduce='token-mean' does not fit: a PerSequence loss is reduced by seq-mean
from hflow import Dataset, Model, Output, PerSequence, Recipe, Sequences, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, reduce="token-mean")
def actor_train(out: Output, seqs: Sequences) -> PerSequence:
    return -seqs.sum(out.logprobs)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
