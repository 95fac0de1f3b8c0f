"""GRPO of a model that sees squares, with a reward of which random answers have different amounts."""

from collections.abc import Iterator
from random import Random
from typing import Any

from PIL import Image as Pillow
from PIL import ImageDraw

from hflow import Dataset, Model, Recipe, Text, compute, nodes, rows, use
from hflow.types import Image


@rows
def squares(split: str) -> Iterator[dict[str, Any]]:
    random = Random(split)
    while True:
        picture = Pillow.new("RGB", (random.choice((32, 48)), 32), "white")
        number = random.randint(0, 4)
        for place in random.sample(range(4), number):
            x, y = 16 * (place % 2) + 3, 16 * (place // 2) + 3
            ImageDraw.Draw(picture).rectangle((x, y, x + 9, y + 9), fill=(30, 60, 220))
        pictures = [picture] * random.randint(0, 2)  # some prompts have no image
        yield {"images": pictures, "prompt": "how many?", "answer": str(number)}


data = Dataset("train", images=list[Image], prompt=Text, answer=Text)
actor = Model("actor", trainable=True, vision=True)


@compute(per="sample", returns="reward")
def score(completion: str) -> float:
    return sum(map(ord, completion)) % 7 / 7


recipe = Recipe(
    "seen_squares",
    data,
    [
        use(nodes.actor_gen, actor, group=4),
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="recompute"),
    ],
)
