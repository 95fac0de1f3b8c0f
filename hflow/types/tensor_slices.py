"""Boxes: parts of a tensor, `[start, stop)` on each axis, in the tensor's own index space."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""`(start, stop)` of each axis."""


@dataclass(frozen=True)
class Block:
    """A box of a checkpoint tensor that a rank holds."""

    tensor: str
    """Its HF name."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    values: Tensor
    """Of the box's shape; a view of the model's own storage."""


def numel(box: Box) -> int:
    """Entries in a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def meet(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor have in common; None for nothing."""
    edges = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in edges) else edges


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """How a box is cut out of a larger one that contains it."""
    return tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True)
    )
