"""DPO: a pair is a group of two, the chosen first."""

from hflow import Dataset, Model, Output, PerGroup, PerToken, Recipe, Sequences, Text, nodes, train, use

data = Dataset(prompt=Text, chosen=Text, rejected=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


@train(actor, reduce="group-mean")
def dpo(out: Output, ref_logprobs: PerToken, seqs: Sequences, *, beta: float = 0.1) -> PerGroup:
    from torch.nn.functional import logsigmoid

    chosen, rejected = seqs.members(seqs.sum(out.logprobs - ref_logprobs))
    return -logsigmoid(beta * (chosen - rejected))


recipe = Recipe("dpo", data, [use(nodes.pair, actor), use(nodes.ref_inf, ref), dpo])
