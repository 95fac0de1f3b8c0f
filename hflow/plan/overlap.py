"""Where the pieces of a tensor that one replica cuts meet those that another one cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from hflow.plan.sharding import Piece
from hflow.types.boxes import Box

Edges = tuple[int, int]
"""`(start, stop)` on one axis."""


@dataclass(frozen=True)
class Overlap:
    """What a piece of the source and a piece of the destination have in common."""

    box: Box
    ours: int
    """Index of the source's piece."""
    theirs: int
    """Index of the destination's piece."""


@lru_cache(maxsize=256)
def overlaps(ours: tuple[Piece, ...], theirs: tuple[Piece, ...]) -> tuple[Overlap, ...]:
    """All overlaps of two partitions of one tensor; none where a partition is empty."""
    left = [(piece.box, i) for i, piece in enumerate(ours)]
    right = [(piece.box, i) for i, piece in enumerate(theirs)]
    return tuple(_overlaps(left, right, ()))


def _overlaps(
    ours: Sequence[tuple[Box, int]], theirs: Sequence[tuple[Box, int]], done: Box
) -> Iterator[Overlap]:
    """The overlaps of boxes that meet in the edges of the axes that are `done`.

    On either side two boxes have the same or disjoint edges on an axis, so that one pass over the sorted
    edges finds all that meet.
    """
    axis = len(done)
    if axis == len(ours[0][0]):
        yield Overlap(done, ours[0][1], theirs[0][1])
        return
    left, right = _by_edges(ours, axis), _by_edges(theirs, axis)
    i = j = 0
    while i < len(left) and j < len(right):
        (start, stop), mine = left[i]
        (other_start, other_stop), others = right[j]
        edges = max(start, other_start), min(stop, other_stop)
        if edges[0] < edges[1]:
            yield from _overlaps(mine, others, (*done, edges))
        i, j = (i + 1, j) if stop <= other_stop else (i, j + 1)


def _by_edges(boxes: Sequence[tuple[Box, int]], axis: int) -> list[tuple[Edges, list[tuple[Box, int]]]]:
    """Boxes by their edges on an axis, ascending."""
    groups: dict[Edges, list[tuple[Box, int]]] = {}
    for entry in boxes:
        groups.setdefault(entry[0][axis], []).append(entry)
    return sorted(groups.items())
