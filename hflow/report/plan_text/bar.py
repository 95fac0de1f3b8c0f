"""A memory bar in letters: readable without colours, and the same everywhere.

Each letter stands for a kind of bytes. A kind's columns are what its bytes round to when the bar is
filled from the left, so that rounding never adds up.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from hflow.plan.forecast import PhaseMemory
from hflow.report.memory_classes import KINDS, kind_of

LETTERS = "wgoalkbrx"
"""The letter of each kind in `KINDS`, and `x` for any other."""
NAMES = (*(name for name, _ in KINDS), "other")
COLOURS = (
    "cyan",
    "magenta",
    "blue",
    "green",
    "yellow",
    "red",
    "dark_orange3",
    "bright_black",
    "bright_black",
)
FREE, LIMIT = "·", "|"


def memory_bar(phase: PhaseMemory, scale: int, capacity: int, width: int) -> Text:
    """The bar of one phase.

    Args:
        phase: what is held.
        scale: bytes of the whole width: the capacity, or the peak where that is more.
        capacity: a `|` marks it where the bar goes on beyond it.
        width: columns.
    """
    bar, filled, end = Text(), 0.0, 0
    for parts, is_resident in ((phase.resident, True), (phase.transient, False)):
        for kind, size in _by_kind(parts):
            filled += size
            start, end = end, round(filled / scale * width)
            letter = LETTERS[kind].upper() if is_resident else LETTERS[kind]
            bar.append(letter * (end - start), COLOURS[kind])
    bar.append(FREE * (width - end), "dim")
    return bar if scale <= capacity else _marked(bar, round(capacity / scale * width))


def legend(names: Iterable[str]) -> Text:
    """The letters of the kinds that occur among item names."""
    kinds = sorted({_kind(name) for name in names})
    return Text("  ").join(Text.assemble((LETTERS[k], COLOURS[k]), f" {NAMES[k]}") for k in kinds)


def _by_kind(parts: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
    sizes: dict[int, int] = {}
    for name, size in parts:
        sizes[_kind(name)] = sizes.get(_kind(name), 0) + size
    return sorted(sizes.items())


def _kind(name: str) -> int:
    return kind_of(name) - 1


def _marked(bar: Text, at: int) -> Text:
    return Text.assemble(bar[:at], (LIMIT, "bold red"), bar[at + 1 :])
