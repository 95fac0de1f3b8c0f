# expect: actor_train: reduce='token-mean' does not fit. For a PerSequence loss, set it to seq-mean
from hflow import Dataset, Model, Output, PerSequence, Recipe, Sequences, Text, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, reduce="token-mean")
def actor_train(out: Output, seqs: Sequences) -> PerSequence:
    return -seqs.sum(out.logprobs)


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), actor_train])
