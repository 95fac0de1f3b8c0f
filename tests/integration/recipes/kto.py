"""KTO on additions: right sums are good answers, and sums that are one too large are bad."""

from random import Random

from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, rows, use

data = Dataset("train", prompt=Text, answer=Text, unrelated=Text, desirable=PerSequence)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


@rows
def labelled(split: str):
    random = Random(split)
    while True:
        first, second, right = random.randrange(100), random.randrange(100), random.randrange(2)
        yield {
            "prompt": f"{first:02d}+{second:02d}=",
            "answer": f"{first + second + 1 - right:03d}",
            "unrelated": f"{random.randrange(199):03d}",
            "desirable": right,
        }


recipe = Recipe(
    "kto",
    data,
    [use(nodes.kto_view, actor), use(nodes.ref_inf, ref), use(nodes.kto, actor, beta=1.0)],
)
