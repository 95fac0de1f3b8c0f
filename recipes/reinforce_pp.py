"""REINFORCE++: one answer per prompt, KL per token in the reward, advantages whitened over the batch.

    hflow run recipes/reinforce_pp.py

There is no critic and there are no groups. The advantage of a token is the reward minus the KL of this and
all later tokens, whitened over the tokens of the batch; the loss is PPO's. Starts from the checkpoint of
`recipes/sft.py`. Expect the held-out accuracy to rise from 0.52 to about 0.90 in 140 steps.

Source: Hu et al. 2025, "REINFORCE++: stabilizing critic-free policy optimization with global advantage
normalization".
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


recipe = Recipe(
    "reinforce_pp",
    data,
    [
        use(nodes.actor_gen, actor),
        use(rewards.exact, name="score", returns="reward"),
        use(nodes.ref_inf, ref),
        use(nodes.kl_reward, beta=0.01),
        nodes.returns_to_go,
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
