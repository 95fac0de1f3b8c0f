"""Boxes: rectangular parts of a tensor, `[start, stop)` on each axis of the whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 64 << 20
"""Tensors are sent in buckets of about this size. A larger one has its own bucket, or is sent in pieces."""
MAX_BUCKETS = 2
"""Buckets that exist at a time where a worker hands them over to an engine's process, or an engine passes
them on to others."""
Box = tuple[tuple[int, int], ...]
"""`(start, stop)` on each axis."""


@dataclass(frozen=True)
class TensorBox:
    """A box of a tensor of a Hugging Face checkpoint."""

    tensor: str
    """The tensor's name."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    box: Box

    def block(self, values: Tensor) -> Block:
        """Return the box with its values."""
        return Block(self.tensor, self.shape, self.box, values)


@dataclass(frozen=True)
class Block(TensorBox):
    """A box of a tensor with its values, such as the part that a rank holds."""

    values: Tensor
    """The values, in the shape of the box; for what a rank holds, a view of the model's own storage."""


def numel(box: Box) -> int:
    """Return the number of entries in a box."""
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a tensor of this shape."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def box_slices(box: Box) -> tuple[slice, ...]:
    """Return the slices that cut a box out of the whole tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    edges = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return None if any(start >= stop for start, stop in edges) else edges


def slices_within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that cut a box out of a larger box which contains it."""
    return tuple(
        slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True)
    )
