"""Between batches and bodies: keyword arguments out of columns, columns out of what bodies return.

Batch-level bodies see tensors, as here; sample- and group-level bodies see plain Python values
(`row_binding`). A batch's columns bear the plain names of the fields of its own stream; a field of
another stream is called `stream/field`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hflow.data.batch import Batch, Column
from hflow.data.unpack_returns import column_of_tensor, split_result
from hflow.errors import RunError, nearest
from hflow.types import Output, Sequences, Unit


class BodySignature(Protocol):
    """What binding needs of a `backends.base.Call` or of a worker's `NodeProgram`."""

    @property
    def reads(self) -> tuple[Any, ...]:
        """`graph.ir.Read` rows."""

    @property
    def provided(self) -> tuple[tuple[str, str], ...]:
        """(parameter, kind)."""

    @property
    def returns(self) -> tuple[tuple[str, str], ...]:
        """(field, unit)."""

    @property
    def metrics(self) -> bool:
        """Whether the last result is a dict of metrics."""

    @property
    def knobs(self) -> Mapping[str, Any]:
        """Hyper-parameters by name."""


def sequences_of(batch: Batch, device: torch.device | str = "cpu") -> Sequences:
    """The shape of a batch; groups are counted in the order of their ids."""
    _, group = np.unique(batch.groups, return_inverse=True)
    return Sequences(
        torch.from_numpy(batch.offsets).to(device),
        to_tensor(column(batch, "loss_mask").values, device).bool(),
        torch.from_numpy(group.astype(np.int64)).to(device),
        int(group.max(initial=-1)) + 1,
    )


OWN_READ = "@"
"""Begins the parameter of a read that the node itself needs (`@mask`), not its body."""


def bind(
    call: BodySignature,
    batch: Batch,
    seqs: Sequences,
    output: Output | None = None,
    made: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a batch-level body: its fields, `Output`, `Sequences` and knobs.

    Args:
        call: the body's reads, provided parameters and knobs.
        batch: columns of every field that it reads.
        seqs: the batch's shape, on the device where the body runs.
        output: the model's, for infer and train bodies.
        made: fields computed on the way, which replace the batch's (`prox_logprobs`).

    Raises:
        RunError: when the batch lacks a field.
    """
    arguments: dict[str, Any] = dict(call.knobs)
    for read in call.reads:
        if read.parameter.startswith(OWN_READ):
            continue
        if made is not None and read.field in made:
            arguments[read.parameter] = made[read.field]
        else:
            arguments[read.parameter] = _argument(read, column_read(read, batch), seqs)
    kinds = {"output": output, "sequences": seqs}
    arguments.update((name, kinds[kind]) for name, kind in call.provided if kind in kinds)
    return arguments


def unpack(
    node: str, call: BodySignature, result: Any, batch: Batch, seqs: Sequences
) -> tuple[dict[str, Column], dict[str, Any]]:
    """Columns and metrics out of what a batch-level body returned.

    Raises:
        RecipeError: when the number of results is not the declared one.
        RunError: when a result's shape is not that of its unit.
    """
    results, metrics = split_result(node, call.returns, call.metrics, result)
    columns = {
        field: column_of_tensor(node, field, Unit(unit), value, batch, seqs)
        for (field, unit), value in zip(call.returns, results, strict=True)
    }
    return columns, metrics


def column(batch: Batch, name: str) -> Column:
    """A column by name.

    Raises:
        RunError: when the batch does not hold it.
    """
    if name not in batch.columns:
        have = ", ".join(sorted(batch.columns)) or "nothing"
        raise RunError(f"a batch lacks {name!r}; it holds {have}{nearest(name, batch.columns)}")
    return batch.columns[name]


def to_tensor(values: Any, device: torch.device | str) -> Tensor:
    """A numpy column as a tensor: floats in fp32, integers in int64, booleans as they are."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    if not array.flags.writeable:  # shared memory of the object store
        array = array.copy()
    return torch.from_numpy(array).to(device)


def column_read(read: Any, batch: Batch) -> Column:
    """The column that a `graph.ir.Read` row names.

    Raises:
        RunError: when the batch does not hold it.
    """
    qualified = f"{read.stream}/{read.field}"
    return column(batch, qualified if qualified in batch.columns else read.field)


def _argument(read: Any, source: Column, seqs: Sequences) -> Any:
    """A column as the reader wants it: repeated to its unit, floats 0 where nothing is learned."""
    if not isinstance(source.values, np.ndarray):
        return source.values
    x = to_tensor(source.values, seqs.index.device)
    if read.unit is Unit.GROUP:
        return x[_first_members(seqs)]
    if read.unit is not Unit.TOKEN:
        return x
    if source.unit is not Unit.TOKEN:
        x = x[seqs.index]
    if not x.is_floating_point():
        return x
    return x.masked_fill(~seqs.loss_mask.view(-1, *[1] * (x.dim() - 1)), 0)


def _first_members(seqs: Sequences) -> Tensor:
    """Row of the first member of each group `[P]`."""
    rows = torch.arange(len(seqs), device=seqs.group.device)
    start = rows.new_full((seqs.num_groups,), len(seqs))
    return start.scatter_reduce(0, seqs.group, rows, "amin")
