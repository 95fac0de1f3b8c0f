"""DPO: a policy trained on preferences, without a reward model and without sampling.

    hflow run recipes/dpo.py

A pair of answers is a group of two, the chosen one first. The checkpoint of `recipes/sft.py` is the initial
policy and the reference. Expect the held-out accuracy of greedy answers (`eval_gen/accuracy`) to rise from
0.52 to about 0.71 in 150 steps: preferences make wrong sums less likely rather than right ones more likely.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, chosen=Text, rejected=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


recipe = Recipe(
    "dpo",
    data,
    [
        use(nodes.pair, actor),
        use(nodes.ref_inf, ref),
        use(nodes.dpo, actor, beta=1.0),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=50, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
