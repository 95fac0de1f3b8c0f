"""Ranges of flattened parameters as boxes of Hugging Face tensors.

The distributed optimizer gives each data rank a range of every flattened parameter. A range of a matrix is
part of a row, whole rows, and part of a row: at most three boxes, which the mapping to HF tensors splits
further. A range of stacked experts is at most five.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from hflow.training.megatron.hf_mapping import MappedParameter, TensorPart
from hflow.types.tensor_slices import Block, Box, box_shape, intersect, numel, slices_within, whole_box


def range_blocks(parameter: MappedParameter, start: int, values: Tensor) -> Iterator[Block]:
    """Yield the boxes of HF tensors in a range of a parameter, as views of its contiguous values.

    The range begins at `start` of the flattened parameter.
    """
    flat, offset = values.view(-1), 0
    for box in boxes_of_range(parameter.shape, start, start + values.numel()):
        size = numel(box)
        yield from _split_box(parameter, box, flat[offset : offset + size].view(box_shape(box)))
        offset += size


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a tensor that a range of its flattened entries consists of, in order."""
    if len(shape) == 1:
        yield ((start, stop),)
        return
    inner = shape[1:]
    width = math.prod(inner)
    while start < stop:
        row, first = divmod(start, width)
        num_rows = 0 if first else (stop - start) // width
        if num_rows:
            yield ((row, row + num_rows), *whole_box(inner))
            start += num_rows * width
            continue
        end = min(stop, (row + 1) * width)
        yield from (((row, row + 1), *box) for box in boxes_of_range(inner, first, first + end - start))
        start = end


def _split_box(parameter: MappedParameter, box: Box, values: Tensor) -> Iterator[Block]:
    """Split a box of a parameter into boxes of HF tensors, leaving out padding."""
    for part in parameter.parts:
        overlap = intersect(_box_of_part(part, parameter), box) if part.length else None
        if overlap is not None:
            shifted = _shifted(overlap, part.shift)
            yield Block(part.tensor, part.shape, shifted, values[slices_within(overlap, box)])


def _box_of_part(part: TensorPart, parameter: MappedParameter) -> Box:
    """Return the box of a part in its parameter."""
    box = whole_box(parameter.shape)
    return (*box[: part.axis], (part.offset, part.offset + part.length), *box[part.axis + 1 :])


def _shifted(box: Box, by: tuple[int, ...]) -> Box:
    return tuple((start + shift, stop + shift) for (start, stop), shift in zip(box, by, strict=True))
