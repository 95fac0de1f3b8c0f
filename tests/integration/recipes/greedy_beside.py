"""Samples with a greedy answer beside each, and groups that are refused while such answers are drawn."""

from hflow import Dataset, Model, PerSequence, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns=("reward", "keep"))
def first_digit(completion: str) -> tuple[float, bool]:
    return float(completion[:1] in "01234"), completion[:1] != "0"


@compute(per="sample", on="greedy", returns="baseline")
def greedy_digit(completion: str) -> float:
    return float(completion[:1] in "01234")


@compute(returns="advantages")
def above(reward: PerSequence, baseline: PerSequence) -> PerSequence:
    return reward - baseline


recipe = Recipe(
    "greedy_beside",
    data,
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=3),
        first_digit,
        use(nodes.actor_gen, actor, name="greedy", on="actor_gen", temperature=0.0, max_tokens=3),
        greedy_digit,
        above,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
