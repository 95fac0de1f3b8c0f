"""Checks what bodies return and converts it to columns. Errors name the node and the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.data.batch import Batch, Column, number_array
from hflow.data.messages import normal_messages
from hflow.errors import DataError, RecipeError, RunError
from hflow.types import Sequences, Unit


def split_result(
    node: str, returns: Sequence[tuple[str, str]], metrics: bool, result: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split what a body returned into its fields, in order, and its metrics.

    Raises:
        RecipeError: if the number of results is not the declared one, or the metrics are not a dict.
    """
    expected = len(returns) + metrics
    results = tuple(result) if expected > 1 and isinstance(result, tuple | list) else (result,)
    if len(results) != expected:
        names = [name for name, _ in returns] + ["metrics"] * metrics
        raise RecipeError(
            f"node {node!r} returned {len(results)} results, but declares {expected}: {', '.join(names)}; "
            "return these"
        )
    if not metrics:
        return results, {}
    if not isinstance(results[-1], dict):
        kind = type(results[-1]).__name__
        raise RecipeError(
            f"node {node!r} declares Metrics, but its last result is a {kind}, not a dict; return one"
        )
    return results[:-1], results[-1]


def metric_value(node: str, name: str, value: Any) -> float:
    """Return a metric of a per-sample or per-group body as a number.

    Raises:
        RunError: if it is not a number.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RunError(f"node {node!r}: metric {name!r} must be a number, not {value!r:.60}") from None


def metric_tensor(node: str, name: str, value: Any) -> Tensor:
    """Return a metric of a batch-level body as a tensor.

    Raises:
        RunError: if it is not made of numbers.
    """
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise RunError(
            f"node {node!r}: metric {name!r} must be a number or a tensor, not {value!r:.60}"
        ) from None


def check_shape(node: str, field: str, unit: Unit, value: Any, seqs: Sequences) -> Tensor:
    """Return a tensor after checking that its length is that of its unit.

    Raises:
        RunError: if it is not a tensor or has another length.
    """
    if not isinstance(value, Tensor):
        raise RunError(f"node {node!r}: {field!r} must be a tensor, the body returned {type(value).__name__}")
    size = num_entries(unit, seqs)
    if value.dim() == 0 or len(value) != size or (unit is not Unit.TOKEN and value.dim() != 1):
        raise RunError(
            f"node {node!r}: {field!r} is per {unit}, so its shape must start with {size}; "
            f"the body returned {list(value.shape)}"
        )
    return value


def num_entries(unit: Unit, seqs: Sequences) -> int:
    """Return the number of entries of a field of a unit: T, S or P."""
    return {Unit.TOKEN: len(seqs.index), Unit.GROUP: seqs.num_groups}.get(unit, len(seqs))


def column_of_tensor(node: str, field: str, unit: Unit, value: Any, batch: Batch, seqs: Sequences) -> Column:
    """Return a result of a batch-level body as a column.

    Raises:
        RunError: if its shape does not match its unit.
    """
    if unit.is_object:
        return column_of_rows(node, field, unit, value, batch)
    tensor = check_shape(node, field, unit, value, seqs)
    if unit is Unit.GROUP:
        tensor = tensor[seqs.group]
    return Column(unit, to_array(tensor))


def column_of_rows(node: str, field: str, unit: Unit, rows: Any, batch: Batch) -> Column:
    """Return one Python value per row of the batch as a column.

    Raises:
        RunError: if the number of values is not the number of rows, or of numbers not that of tokens.
    """
    rows = check_rows(node, field, rows, len(batch))
    if unit is Unit.TEXT and not all(isinstance(row, str) for row in rows):
        invalid = next(row for row in rows if not isinstance(row, str))
        raise RunError(f"node {node!r}: {field!r} must be a string, the body returned {invalid!r:.60}")
    if unit is Unit.MESSAGES:
        try:
            rows = [normal_messages(row, field) for row in rows]
        except DataError as error:
            raise RunError(f"node {node!r}: {error}") from error
    if unit.is_object:
        return Column(unit, rows)
    if unit is not Unit.TOKEN:
        return Column(unit, _numbers(node, field, rows))
    for row, length in zip(rows, batch.lengths.tolist(), strict=True):  # host: numpy
        if not isinstance(row, list) or len(row) != length:
            raise RunError(
                f"node {node!r}: {field!r} is per token, so it must be a list of {length} numbers; "
                f"the body returned {f'{len(row)} of them' if isinstance(row, list) else type(row).__name__}"
            )
    return Column(unit, _numbers(node, field, [number for row in rows for number in row]))


def check_rows(node: str, field: str, rows: Any, size: int) -> list[Any]:
    """Return the rows after checking that they are a list of that size.

    Raises:
        RunError: if they are not.
    """
    if not isinstance(rows, list) or len(rows) != size:
        got = f"{len(rows)} values" if isinstance(rows, list) else type(rows).__name__
        raise RunError(f"node {node!r}: {field!r} must be a list of {size} values, the body returned {got}")
    return rows


def check_value(node: str, field: str, unit: Unit, value: Any, num_tokens: int) -> None:
    """Check that the value of one sample matches its unit.

    Raises:
        RunError: as `column_of_rows`.
    """
    one = np.ones(1, dtype=np.int64)
    column_of_rows(node, field, unit, [value], Batch(one, one, num_tokens * one, {}))


def to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as numpy; floats of less than 32 bits become fp32."""
    tensor = tensor.detach()
    wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
    return wide.cpu().numpy()  # waits: once per field that a body returns


def _numbers(node: str, field: str, values: list[Any]) -> npt.NDArray[Any]:
    """Return Python numbers as an array."""
    try:
        array = number_array(field, values)
    except ValueError:  # values of different shapes
        array = np.array(values, dtype=object)
    if array.dtype.kind not in "biuf" or array.ndim != 1:
        invalid = [value for value in values if not isinstance(value, bool | int | float)]
        got = f"{invalid[0]!r:.60}" if invalid else "a number of more than 64 bits"
        raise RunError(f"node {node!r}: {field!r} must be a number, the body returned {got}")
    return array
