"""Makes arguments of bodies that are called per sample or per group, and columns from what they return.

Arguments are plain Python values. All calls on a batch are bound together, and their results become columns
of one batch, since packing and slicing cost more than most bodies. A call's samples are consecutive rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import BodySignature, column_of_read, get_column
from hflow.data.batches.returned_values import CallLevel
from hflow.data.batches.unpack_returns import column_of_values
from hflow.data.text.messages import read_as
from hflow.types import Unit

if TYPE_CHECKING:
    from hflow.graph.ir import Read


def bind_rows(
    signature: BodySignature, batch: Batch, sizes: Sequence[int], level: CallLevel
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each call: values for a sample, lists over the members for a group.

    The caller adds provided parameters (`Tokenizer`, `State`, `Engine`). The first rows of the batch are
    those of the first call; `sizes` has the samples of each.

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
    returns: Sequence[tuple[str, str]],
    results: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    level: CallLevel,
) -> dict[str, Column]:
    """Return columns from what the calls returned, of `sizes` samples each.

    `results` has the fields of each call, as `DeclaredReturns.read` returns them: for a per-group body lists
    over the members, or one value for a GROUP field.
    """
    columns = {}
    for index, (field, unit) in enumerate(returns):
        is_scalar = level == "sample" or unit == Unit.GROUP
        rows: list[Any] = []
        for values, size in zip(results, sizes, strict=True):
            rows += [values[index]] * size if is_scalar else values[index]
        columns[field] = column_of_values(field, Unit(unit), rows)
    return columns


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
