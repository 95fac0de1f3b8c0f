"""Makes columns of what bodies return: of tensors of whole batches, which it checks, and of checked values.

`returned_values` checks what bodies return for one sample or group. Errors name the node and the field.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from hflow.base.errors import ReturnError
from hflow.data.batches.batch import Batch, Column, number_array
from hflow.data.batches.returned_values import checked_rows, checked_value
from hflow.types import Sequences, Unit


def metric_tensor(node: str, name: str, value: Any) -> Tensor:
    """Return a metric of a batch-level body as a tensor.

    Raises:
        ReturnError: if it is not made of numbers.
    """
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ReturnError(
            f"node {node!r}: metric {name!r} must be a number or a tensor, not {value!r:.60}"
        ) from None


def check_shape(node: str, field: str, unit: Unit, value: Any, seqs: Sequences) -> Tensor:
    """Return a tensor after checking that its length is that of its unit.

    Raises:
        ReturnError: if it is not a tensor or has another length.
    """
    if not isinstance(value, Tensor):
        raise ReturnError(
            f"node {node!r}: {field!r} must be a tensor, the body returned {type(value).__name__}"
        )
    if value.layout is not torch.strided or value.is_complex():
        kind = "complex" if value.is_complex() else "sparse or jagged"
        raise ReturnError(f"node {node!r}: {field!r} must be a dense tensor of real numbers, not {kind}")
    size = num_entries(unit, seqs)
    if value.dim() == 0 or len(value) != size or (unit is not Unit.TOKEN and value.dim() != 1):
        raise ReturnError(
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
        ReturnError: if its shape does not match its unit.
    """
    if unit.is_object:
        rows = checked_rows(node, field, value, len(batch))
        return Column(unit, [checked_value(node, field, unit, row, 0) for row in rows])
    tensor = check_shape(node, field, unit, value, seqs)
    if unit is Unit.GROUP:
        tensor = tensor[seqs.group]
    return Column(unit, to_array(tensor))


def column_of_values(field: str, unit: Unit, values: list[Any]) -> Column:
    """Pack one checked Python value per sample, for TOKEN a list, as a column."""
    if unit.is_object:
        return Column(unit, values)
    if unit is Unit.TOKEN:
        values = [number for row in values for number in row]
    return Column(unit, number_array(field, values))


def to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as numpy; floats of less than 32 bits become fp32."""
    tensor = tensor.detach()
    wide = tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
    return wide.cpu().numpy()  # waits: once per field that a body returns
