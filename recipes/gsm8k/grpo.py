"""GRPO on GSM8K: eight answers to each question, and advantages relative to the group.

    hflow run recipes/gsm8k/grpo.py setup=qwen2.5-0.5b-1x24g

`setup` names a model and its hardware: a file of the directory `setup/`. The reward is 1 if the number behind
the last `####` of an answer is that of the solution. The test split is answered greedily every 20 steps
(`eval_gen/accuracy`).

The engine computes in bf16 with other kernels than the trainer. So the trainer computes the log-probs of the
samples again (`prox="recompute"`), and the loss weights each token by how the two differ, truncated at
`behav_weight_cap`. `grpo_async.py` uses the same recipe, as the same weights correct for staleness.
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)

recipe = Recipe(
    "gsm8k_grpo",
    data,
    [
        use(nodes.chat_gen, actor, group=8),
        use(rewards.final_number, returns="reward"),
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=4, prox="recompute", over_cap="truncate"),
        use(nodes.chat_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.final_number, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
