"""RLOO: each answer is compared with the mean of the other answers to its prompt; no clipping.

    hflow run recipes/rloo.py

Starts from the checkpoint of `recipes/sft.py`, like `recipes/grpo.py`. Each step makes one update on samples
of the current policy, so the ratio is 1 and the gradient is that of REINFORCE. The loss sums the log-probs
of an answer (`seq-mean-token-sum`), because the whole answer is one action. Expect the held-out accuracy to
rise from 0.52 to about 0.89 in 140 steps.

Source: Ahmadian et al. 2024, "Back to basics: revisiting REINFORCE-style optimization for learning from
human feedback in LLMs"; Kool et al. 2019.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "rloo",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        use(rewards.exact, name="score", returns="reward"),
        nodes.leave_one_out,
        use(nodes.actor_train, actor, prox="none", reduce="seq-mean-token-sum"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
