"""Makes arguments of bodies that are called per sample or per group, and columns from what they return.

Arguments are plain Python values. All calls on a batch are bound together, and their results become columns
of one batch, since packing and slicing cost more than most bodies. A call's samples are consecutive rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hflow.data.batch import Batch, Column
from hflow.data.batch_arguments import BodySignature, column_of_read, get_column
from hflow.data.messages import read_as
from hflow.data.unpack_returns import check_rows, column_of_rows, split_result
from hflow.types import Unit

if TYPE_CHECKING:
    from hflow.graph.ir import Read

CallLevel = Literal["sample", "group"]


def bind_rows(
    signature: BodySignature, batch: Batch, sizes: Sequence[int], level: CallLevel
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call: values for a sample, lists over the members for a group.

    The caller adds provided parameters (`Tokenizer`, `State`, `Engine`).

    Args:
        signature: the body's reads and knobs.
        batch: has columns of every field that the body reads; first the rows of the first call.
        sizes: number of samples of each call; all 1 for calls per sample.
        level: whether a call is for a sample or for a group.

    Raises:
        RunError: if the batch lacks a field.
    """
    arguments = [dict(signature.knobs) for _ in sizes]
    spans = list(_spans(sizes))
    for read in signature.reads:
        rows = _python_rows(read, column_of_read(read, batch), batch)
        is_scalar = level == "sample" or read.unit is Unit.GROUP
        for call_arguments, (first, end) in zip(arguments, spans, strict=True):
            call_arguments[read.parameter] = rows[first] if is_scalar else rows[first:end]
    return arguments


def unpack_rows(
    node: str,
    signature: BodySignature,
    results: Sequence[Any],
    batch: Batch,
    sizes: Sequence[int],
    level: CallLevel,
) -> tuple[dict[str, Column], list[dict[str, Any]]]:
    """Return columns from what the calls returned, and the metrics of each call.

    A per-group body returns a list over the members, or one value for a GROUP field.

    Raises:
        RecipeError: if the number of results is not the declared one.
        RunError: if a result's length or type does not match its unit.
    """
    split = [split_result(node, signature.returns, signature.metrics, result) for result in results]
    columns = {}
    for index, (field, unit) in enumerate(signature.returns):
        is_scalar = level == "sample" or unit == Unit.GROUP
        rows: list[Any] = []
        for (values, _), size in zip(split, sizes, strict=True):
            value = values[index]
            rows += [value] * size if is_scalar else check_rows(node, field, value, size)
        columns[field] = column_of_rows(node, field, Unit(unit), rows, batch)
    return columns, [metrics for _, metrics in split]


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Return the rows `[first, end)` of each call."""
    return pairwise(accumulate(sizes, initial=0))


def _python_rows(read: Read, source: Column, batch: Batch) -> list[Any]:
    """Return one Python value for each sample, by the rules of `batch_arguments`."""
    values = source.values
    if not isinstance(values, np.ndarray):
        return [read_as(value, source.unit, read.unit) for value in values]
    if read.unit is not Unit.TOKEN:
        return list(values.tolist())
    if source.unit is not Unit.TOKEN:
        values = np.repeat(values, batch.lengths)
    if values.dtype.kind == "f":
        mask = np.asarray(get_column(batch, "loss_mask").values, dtype=bool)
        values = np.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    tokens, offsets = values.tolist(), batch.offsets.tolist()
    return [tokens[first:end] for first, end in pairwise(offsets)]
