"""Drawn pictures with questions about them, which a tiny model that sees can learn.

A picture of 32 x 32 pixels has four places, and in each of them a square, a circle or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from hflow.base.errors import DataError
from hflow.data.rows.row_schema import RowSchema

NUM_ROWS: Mapping[str, int] = {"train": 20_000, "heldout": 200}
COLOURS = {"red": (220, 40, 40), "green": (30, 160, 60), "blue": (50, 70, 220)}
PLACES = ("top left", "top right", "bottom left", "bottom right")
_SIDE = 16
"""Pixels of a place."""

Thing = tuple[str, str] | None
"""Colour and shape of what is in a place."""


class DrawnShapes:
    """Questions about a number, a colour or a place: 20,000 (split `train`) or 200 others (`heldout`).

    Columns: `images` (one picture), `prompt` (`"how many red?"`) and `answer` (`"2"`). Rows are fixed.
    """

    files: tuple[Path, ...] = ()
    """It has none."""

    def __init__(self, task: str, split: str, arguments: Mapping[str, Any], schema: RowSchema) -> None:
        """Select the split.

        Raises:
            DataError: if the split or a column is unknown, or for a task or arguments, which it has none of.
        """
        if task or arguments:
            raise DataError(f"drawn shapes take neither a task nor arguments; remove {schema.key}.arguments")
        if split not in NUM_ROWS:
            raise DataError(f"drawn shapes have no split {split!r}; choose one of {sorted(NUM_ROWS)}")
        self._split = split
        self._schema = schema
        schema.check(("images", "prompt", "answer"), "drawn shapes")

    def __len__(self) -> int:
        return NUM_ROWS[self._split]

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of the split."""
        random = Random(f"{self._split}/{index}")
        things = [(random.choice([*COLOURS]), random.choice(["square", "circle"])) for _ in PLACES]
        shown: list[Thing] = [thing if random.random() < 0.75 else None for thing in things]
        prompt, answer = question(random, shown)
        row = {"images": [draw(shown)], "prompt": prompt, "answer": answer}
        return self._schema.row(row, self.where(index))

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"drawn shapes ({self._split}), row {index}"


def draw(things: Sequence[Thing]) -> Any:
    """Return a picture, of Pillow, of what is in each place."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (2 * _SIDE, 2 * _SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for number, thing in enumerate(things):
        if thing is not None:
            colour, shape = thing
            x, y = _SIDE * (number % 2) + 2, _SIDE * (number // 2) + 2
            outline = pen.rectangle if shape == "square" else pen.ellipse
            outline((x, y, x + 11, y + 11), fill=COLOURS[colour])
    return picture


def question(random: Random, things: Sequence[Thing]) -> tuple[str, str]:
    """Return a question about a picture, and its answer."""
    kind, colour = random.choice(["number", "colour", "place"]), random.choice([*COLOURS])
    of_colour = [number for number, thing in enumerate(things) if thing is not None and thing[0] == colour]
    if kind == "place" and len(of_colour) == 1:
        return f"where is {colour}?", PLACES[of_colour[0]]
    number = random.randrange(len(PLACES))
    thing = things[number]
    if kind == "colour" and thing is not None:
        return f"{PLACES[number]}?", thing[0]
    return f"how many {colour}?", str(len(of_colour))
