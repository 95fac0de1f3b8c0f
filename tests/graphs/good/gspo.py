"""GSPO: the ratio of whole sequences, with the loss in the same unit."""

from hflow import (
    Dataset,
    Model,
    Output,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    algo,
    compute,
    nodes,
    train,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


@train(actor, reduce="seq-mean", minibatches=4)
def gspo(
    out: Output, behav_logprobs: PerToken, advantages: PerSequence, seqs: Sequences, *, clip: float = 3e-4
) -> PerSequence:
    return algo.clipped_surrogate(seqs.mean(out.logprobs), seqs.mean(behav_logprobs), advantages, clip)


recipe = Recipe("gspo", data, [use(nodes.actor_gen, actor, group=8), score, nodes.group_advantage, gspo])
