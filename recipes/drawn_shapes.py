"""Rows with drawn pictures, and questions about them, for the recipes of models that see.

A picture of 32 x 32 pixels has four places, and in each of them a square, a circle or nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from hflow import rows

COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (50, 70, 220)}
PLACES = ("top left", "top right", "bottom left", "bottom right")


@rows
def shapes(split: str) -> Iterator[dict[str, Any]]:
    """Yield pictures with a question about a number, a colour or a place, and its answer, without end."""
    random = Random(f"shapes/{split}")
    while True:
        things = [(random.choice([*COLOURS]), random.choice(["square", "circle"])) for _ in PLACES]
        things = [thing if random.random() < 0.75 else None for thing in things]
        yield {"images": [draw(things)], **question(random, things)}


def draw(things: list[tuple[str, str] | None]) -> Image.Image:
    """Return a picture of what is in each place."""
    picture = Image.new("RGB", (32, 32), "white")
    pen = ImageDraw.Draw(picture)
    for number, thing in enumerate(things):
        if thing is not None:
            x, y = 16 * (number % 2) + 2, 16 * (number // 2) + 2
            outline = pen.rectangle if thing[1] == "square" else pen.ellipse
            outline((x, y, x + 11, y + 11), fill=COLOURS[thing[0]])
    return picture


def question(random: Random, things: list[tuple[str, str] | None]) -> dict[str, str]:
    """Return a question about a picture, and its answer."""
    kind = random.choice(["number", "colour", "place"])
    colour = random.choice([*COLOURS])
    of_colour = [number for number, thing in enumerate(things) if thing and thing[0] == colour]
    if kind == "place" and len(of_colour) == 1:
        return {"prompt": f"where is {colour}?", "answer": PLACES[of_colour[0]]}
    number = random.randrange(len(PLACES))
    thing = things[number]
    if kind == "colour" and thing is not None:
        return {"prompt": f"{PLACES[number]}?", "answer": thing[0]}
    return {"prompt": f"how many {colour}?", "answer": str(len(of_colour))}
