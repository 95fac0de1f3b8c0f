"""KTO: learns from single answers that are labelled as good or bad, without pairs.

    hflow run recipes/kto.py

Right sums are good answers, and random numbers bad ones. Each row also has an answer to another
question, from which the loss estimates how far the policy is from the reference. Starts from the checkpoint
of `recipes/sft.py`. Expect the held-out accuracy of greedy answers to rise from 0.52 to 0.76 in 50 steps.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from hflow import Dataset, Model, PerSequence, Recipe, Text, nodes, rewards, rows, use

data = Dataset("train", prompt=Text, answer=Text, unrelated=Text, desirable=PerSequence)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


@rows
def labelled(split: str) -> Iterator[dict[str, Any]]:
    random = Random(split)
    while True:
        first, second, right = random.randrange(100), random.randrange(100), random.randrange(2)
        yield {
            "prompt": f"{first:02d}+{second:02d}=",
            "answer": f"{first + second if right else random.randrange(199):03d}",
            "unrelated": f"{random.randrange(199):03d}",
            "desirable": right,
        }


recipe = Recipe(
    "kto",
    data,
    [
        use(nodes.kto_view, actor),
        use(nodes.ref_inf, ref),
        use(nodes.kto, actor, beta=1.0),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=50, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
