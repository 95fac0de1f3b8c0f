"""Between batches and bodies that are called for a sample or a group: plain Python values.

Many calls are bound from one batch, and their results become columns of one batch, since packing
and slicing cost more than most bodies. A call's samples are consecutive rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from hflow.data.batch import Batch, Column
from hflow.data.batch_arguments import BodySignature, column, column_read
from hflow.data.unpack_returns import check_rows, column_of_rows, split_result
from hflow.types import Unit

CallLevel = Literal["sample", "group"]


def bind_rows(
    call: BodySignature, batch: Batch, sizes: Sequence[int], level: CallLevel
) -> list[dict[str, Any]]:
    """Keyword arguments of each call: values for a sample, lists over the members for a group.

    Parameters that are provided (`Tokenizer`, `State`, `Engine`) are added by the caller.

    Args:
        call: the body's reads and knobs.
        batch: columns of every field that it reads; the rows of the first call, then the second's.
        sizes: samples of each call; all 1 at the level of samples.
        level: whether a call is for a sample or for a group.

    Raises:
        RunError: when the batch lacks a field.
    """
    arguments = [dict(call.knobs) for _ in sizes]
    spans = list(_spans(sizes))
    for read in call.reads:
        rows = _python_rows(read, column_read(read, batch), batch)
        one = level == "sample" or read.unit is Unit.GROUP
        for given, (first, end) in zip(arguments, spans, strict=True):
            given[read.parameter] = rows[first] if one else rows[first:end]
    return arguments


def unpack_rows(
    node: str,
    call: BodySignature,
    results: Sequence[Any],
    batch: Batch,
    sizes: Sequence[int],
    level: CallLevel,
) -> tuple[dict[str, Column], list[dict[str, Any]]]:
    """Columns out of what the calls returned, and the metrics of each.

    A per-group body returns a list over the members, or one value where the unit is GROUP. The
    same errors as `unpack`.
    """
    split = [split_result(node, call.returns, call.metrics, result) for result in results]
    columns = {}
    for place, (field, unit) in enumerate(call.returns):
        shared = level == "sample" or unit == Unit.GROUP
        rows: list[Any] = []
        for (values, _), size in zip(split, sizes, strict=True):
            value = values[place]
            rows += [value] * size if shared else check_rows(node, field, value, size)
        columns[field] = column_of_rows(node, field, Unit(unit), rows, batch)
    return columns, [metrics for _, metrics in split]


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The rows of each call: first and end."""
    return pairwise(accumulate(sizes, initial=0))


def _python_rows(read: Any, source: Column, batch: Batch) -> list[Any]:
    """One Python value for each sample, by the same rules as for tensors (`binding.bind`)."""
    values = source.values
    if not isinstance(values, np.ndarray):
        return list(values)
    if read.unit is not Unit.TOKEN:
        return list(values.tolist())
    if source.unit is not Unit.TOKEN:
        values = np.repeat(values, batch.lengths)
    if values.dtype.kind == "f":
        mask = np.asarray(column(batch, "loss_mask").values, dtype=bool)
        values = np.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, 0)
    tokens, offsets = values.tolist(), batch.offsets.tolist()
    return [tokens[first:end] for first, end in pairwise(offsets)]
