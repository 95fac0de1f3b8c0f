"""A reward model from preferences: pairs of answers, of which the chosen one is to score higher.

    hflow run recipes/reward_model.py

A pair is a group of two, the chosen first. Here the right sum is preferred to one with a wrong digit.
Starts from the checkpoint of `recipes/sft.py` with a fresh scalar head. Expect it to tell about 86 % of the
held-out pairs (`eval_pair/accuracy`) after 300 steps.
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
