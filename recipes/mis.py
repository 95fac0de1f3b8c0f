"""Masked importance sampling: weights for stale or differing samples, and rejection of those too far away.

    hflow run recipes/mis.py

Starts from the checkpoint of `recipes/sft.py`, and generates ahead of training like `recipes/grpo_async.py`.
Two nodes compare the policy at the start of the step (prox) with the one that generated the tokens (behav):

- `behav_weights` weighs each token by its ratio, and gives those outside the bounds the weight 0 (masked
  importance sampling; with both bounds, IcePop).
- `is_trusted` masks whole sequences whose mean divergence per token is too large. They do not count in the
  mean of the loss.

Both report what they reject: `behav_weights/outside`, `behav_weights/ess` (the effective sample size, a share
of the tokens) and `is_trusted/rejected_sequences`. Variants:

    hflow run recipes/mis.py nodes.behav_weights.outside=truncate      # truncated importance sampling
    hflow run recipes/mis.py nodes.behav_weights.level=sequence        # one weight for a sequence
    hflow run recipes/mis.py nodes.actor_train.clip=1e9                # no clipping around prox

Source: Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference
mismatch"; Ling team 2025, "Every step evolves" (IcePop).
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "mis",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        use(rewards.exact, name="score", returns="reward"),
        nodes.group_advantage,
        use(nodes.behav_weights, lower=0.5, upper=2.0, outside="mask"),
        use(nodes.is_trusted, statistic="k3", extent="sequence-mean", upper=0.1),
        use(nodes.actor_train, actor, minibatches=2, prox="recompute", mask="is_trusted"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
