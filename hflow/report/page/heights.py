"""Where the places of a layered drawing lie: their tops, so that edges run straight where they can.

Within a column nothing overlaps; each place wants to be level with its neighbours, and the least sum of
squared wishes left open decides (isotonic regression), column by column, to and fro.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUM_SWEEPS = 24
AT_REST = 0.01
"""Weight of staying where it is, beside the edges that pull."""


@dataclass(frozen=True)
class Pull:
    """One piece of an edge between neighbouring columns: its ends want to be level."""

    src: str
    dst: str
    leaves: float
    """Where it leaves, below the source's top."""
    enters: float
    """Where it enters, below the destination's top."""
    weight: float = 1.0


def place_tops(
    columns: Sequence[Sequence[str]], heights: Mapping[str, float], pulls: Sequence[Pull], gap: float
) -> dict[str, float]:
    """The top of every place; the topmost is at 0.

    Args:
        columns: layer -> places, top to bottom.
        heights: place -> height.
        pulls: pieces of edges between neighbouring columns.
        gap: least distance between two neighbours of a column.
    """
    tops = {name: top for column in columns for name, top in _stack(column, heights, gap)}
    for sweep in range(NUM_SWEEPS):
        forward = sweep % 2 == 0
        for column in columns if forward else reversed(columns):
            _settle(column, tops, heights, _wishes(tops, pulls, forward), gap)
    both = _wishes(tops, pulls, True), _wishes(tops, pulls, False)
    for column in columns:
        merged = {name: both[0].get(name, []) + both[1].get(name, []) for name in column}
        _settle(column, tops, heights, merged, gap)
    highest = min(tops.values(), default=0.0)
    return {name: top - highest for name, top in tops.items()}


Wishes = Mapping[str, list[tuple[float, float]]]
"""Place -> (top that an edge asks for, its weight)."""


def _wishes(tops: Mapping[str, float], pulls: Sequence[Pull], forward: bool) -> Wishes:
    wishes: dict[str, list[tuple[float, float]]] = {}
    for pull in pulls:
        if forward:
            wishes.setdefault(pull.dst, []).append((tops[pull.src] + pull.leaves - pull.enters, pull.weight))
        else:
            wishes.setdefault(pull.src, []).append((tops[pull.dst] + pull.enters - pull.leaves, pull.weight))
    return wishes


def _stack(column: Sequence[str], heights: Mapping[str, float], gap: float) -> list[tuple[str, float]]:
    """A column centred on 0."""
    top = -(sum(heights[name] for name in column) + gap * (len(column) - 1)) / 2
    rows = []
    for name in column:
        rows.append((name, top))
        top += heights[name] + gap
    return rows


def _settle(
    column: Sequence[str],
    tops: dict[str, float],
    heights: Mapping[str, float],
    wishes: Wishes,
    gap: float,
) -> None:
    """Move the places of one column to where edges ask for, in their order and without overlap."""
    blocks: list[tuple[float, float, list[tuple[str, float]]]] = []
    offset = 0.0
    for name in column:
        asked = [*wishes.get(name, []), (tops[name], AT_REST)]
        weight = sum(share for _, share in asked)
        mean = sum(top * share for top, share in asked) / weight - offset
        members = [(name, offset)]
        while blocks and blocks[-1][0] > mean:
            above, above_weight, above_members = blocks.pop()
            mean = (above * above_weight + mean * weight) / (above_weight + weight)
            weight, members = weight + above_weight, above_members + members
        blocks.append((mean, weight, members))
        offset += heights[name] + gap
    for mean, _, members in blocks:
        for name, offset in members:
            tops[name] = mean + offset
