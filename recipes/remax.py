"""ReMax: the baseline is the reward of the greedy answer to the same prompt; no critic and no groups.

    hflow run recipes/remax.py

A second generate node derives its stream from the first (`on="actor_gen"`): it answers the prompt of each
sample at temperature 0. Streams are joined by sample, so the score of the greedy answer is available as
`baseline` next to the sample's `reward`. The loss sums the log-probs of an answer (`seq-mean-token-sum`),
because the whole answer is one action. Starts from the checkpoint of `recipes/sft.py`. Expect the held-out
accuracy to rise from 0.52 to about 0.89 in 140 steps.

Source: Li et al. 2023, "ReMax: a simple, effective, and efficient reinforcement learning method for aligning
large language models".
"""

from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(returns="advantages")
def above_greedy(reward: PerSequence, baseline: PerSequence) -> PerSequence:
    return reward - baseline


recipe = Recipe(
    "remax",
    data,
    [
        use(nodes.actor_gen, actor),
        use(rewards.exact, name="score", returns="reward"),
        use(nodes.actor_gen, actor, name="greedy", on="actor_gen", temperature=0.0),
        use(rewards.exact, name="greedy_score", on="greedy", returns="baseline"),
        above_greedy,
        use(nodes.actor_train, actor, prox="none", reduce="seq-mean-token-sum"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
