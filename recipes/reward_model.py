"""A reward model trained on preferences: the chosen answer of a pair should get the higher score.

    hflow run recipes/reward_model.py

A pair of answers is a group of two, the chosen one first. The chosen answer is the right sum, the rejected
one has a wrong digit. Starts from the checkpoint of `recipes/sft.py` with a new scalar head. Expect it to
rank 88 % of the held-out pairs correctly (`eval_pair/accuracy`) after 300 steps.
"""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, chosen=Text, rejected=Text)
heldout = Dataset("heldout", prompt=Text, chosen=Text, rejected=Text)
rm = Model("rm", head="score", trainable=True)


@compute(per="group", on="eval_pair", returns="accuracy")
def prefers_chosen(score: list[float]) -> float:
    return float(score[0] > score[1])


recipe = Recipe(
    "reward_model",
    data,
    [
        use(nodes.pair, rm),
        use(nodes.reward_train, rm),
        use(nodes.pair, rm, name="eval_pair", data=heldout, every=50),
        use(nodes.rew_inf, rm, name="eval_inf", on="eval_pair", returns="score"),
        prefers_chosen,
    ],
)
