"""Arguments of batch-level bodies from columns, and columns from what the bodies return.

Batch-level bodies get tensors. For bodies that are called per sample or per group, which get plain Python
values, see `row_arguments`. A column has the plain name of a field of the batch's own stream; a field of
another stream is called `stream/field`.

A body may also ask for a TensorDict, and return one. The library `tensordict` is an extra, which is imported
when a body asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hflow.base.errors import ReturnError, RunError, nearest
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.device_copy import to_device
from hflow.data.batches.returned_values import split_result
from hflow.data.batches.unpack_returns import column_of_tensor
from hflow.types import Output, Sequences, Unit

if TYPE_CHECKING:
    from hflow.graph.ir import Read


TENSORDICT = "tensordict"
"""The kind of a parameter that receives a TensorDict."""


def make_tensordict(entries: Mapping[str, Tensor], num_samples: int) -> Any:
    """Return entries as a TensorDict of batch size `[S]`."""
    from tensordict import TensorDict

    return TensorDict(dict(entries), batch_size=[num_samples])


def unpack_tensordict(node: str, returns: Sequence[tuple[str, str]], result: Any, seqs: Sequences) -> Any:
    """Return a result with the fields of a TensorDict, if it begins with one, as packed tensors.

    Raises:
        ReturnError: if the TensorDict lacks a field, or one has other lengths than the batch.
    """
    first, *rest = result if isinstance(result, tuple) else (result,)
    if not _is_tensordict(first):
        return result
    values = tuple(_packed(node, field, Unit(unit), first, seqs) for field, unit in returns)
    return values[0] if len(values) == 1 and not rest else (*values, *rest)


def _is_tensordict(value: Any) -> bool:
    library = sys.modules.get("tensordict")
    return library is not None and isinstance(value, library.TensorDictBase)


def _packed(node: str, field: str, unit: Unit, entries: Any, seqs: Sequences) -> Any:
    names = [str(name) for name in entries.keys()]  # noqa: SIM118 - iterating a TensorDict yields its rows
    if field not in names:
        raise ReturnError(
            f"node {node!r}: the returned TensorDict lacks {field!r}; it has {', '.join(names) or 'nothing'}"
            f"{nearest(field, names)}"
        )
    value: Tensor = entries[field]
    if unit is Unit.GROUP and not value.is_nested:
        return _of_groups(node, field, value, seqs)
    if unit is not Unit.TOKEN or not value.is_nested:
        return value
    offsets: Tensor = entries[field].offsets()
    offsets = offsets.to(seqs.offsets.device)  # waits: only for offsets that the body made elsewhere
    if not value.is_contiguous() or not torch.equal(offsets, seqs.offsets):
        raise ReturnError(
            f"node {node!r}: {field!r} is per token, so it must be jagged with the lengths of the batch, as "
            "batch['input_ids'] is"
        )
    return value.values()


def _of_groups(node: str, field: str, value: Tensor, seqs: Sequences) -> Tensor:
    """Return `[P]` values of `[S]` ones, which must agree within each group."""
    if value.dim() != 1 or len(value) != len(seqs):
        return value
    per_group = value.new_zeros(seqs.num_groups).index_copy(0, seqs.group, value)
    if not torch.equal(per_group[seqs.group], value):
        raise ReturnError(f"node {node!r}: {field!r} is per group, but differs within a group")
    return per_group


FRAMEWORK_READ = "@"
"""Prefix of the parameter of a read that the framework needs, not the body, such as `@mask`."""


class BodySignature(Protocol):
    """The attributes of a `training.interface.NodeCall` or a worker's `NodeProgram` that are used here."""

    @property
    def reads(self) -> tuple[Read, ...]:
        """The fields that the body reads."""

    @property
    def provided(self) -> tuple[tuple[str, str], ...]:
        """(parameter, kind) of what the framework passes."""

    @property
    def returns(self) -> tuple[tuple[str, str], ...]:
        """(field, unit) of each result."""

    @property
    def metrics(self) -> bool:
        """Whether the last result is a dict of metrics."""

    @property
    def knobs(self) -> Mapping[str, Any]:
        """Hyper-parameters by parameter name."""


def sequences_of(batch: Batch, device: torch.device | str = "cpu") -> Sequences:
    """Return the shape of a batch as tensors; groups are numbered in the order of their ids."""
    _, group, sizes = np.unique(batch.groups, return_inverse=True, return_counts=True)
    return Sequences(
        to_device(torch.from_numpy(batch.offsets), device),
        to_tensor(get_column(batch, "loss_mask").values, device).bool(),
        to_device(torch.from_numpy(group.astype(np.int64)), device),
        tuple(sizes.tolist()),
    )


def bind_batch(
    signature: BodySignature,
    batch: Batch,
    seqs: Sequences,
    output: Output | None = None,
    computed: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of a batch-level body: its fields, `Output`, `Sequences` and knobs.

    Args:
        seqs: the batch's shape, on the body's device.
        computed: fields that the backend has computed, which replace the batch's (`prox_logprobs`).

    Raises:
        RunError: if the batch lacks a field.
    """
    arguments: dict[str, Any] = dict(signature.knobs)
    members: dict[str, dict[str, Tensor]] = {
        name: {} for name, kind in signature.provided if kind == TENSORDICT
    }
    for read in signature.reads:
        if read.parameter.startswith(FRAMEWORK_READ):
            continue
        owner, _, member = read.parameter.partition(".")
        given = None if computed is None else computed.get(read.field)
        if member:
            members[owner][member] = tensordict_entry(read, batch, seqs, given)
        elif given is not None:
            arguments[read.parameter] = given
        else:
            arguments[read.parameter] = _argument(read, column_of_read(read, batch), seqs)
    arguments.update((name, make_tensordict(entries, len(seqs))) for name, entries in members.items())
    provided = {"output": output, "sequences": seqs, "separate_sequences": seqs}
    arguments.update((name, provided[kind]) for name, kind in signature.provided if kind in provided)
    return arguments


def unpack_batch(
    node: str, signature: BodySignature, result: Any, batch: Batch, seqs: Sequences
) -> tuple[dict[str, Column], dict[str, Any]]:
    """Return columns and metrics from what a batch-level body returned.

    Raises:
        ReturnError: if the number of results is not the declared one, or one does not match its unit.
    """
    result = unpack_tensordict(node, signature.returns, result, seqs)
    results, metrics = split_result(node, signature.returns, signature.metrics, result)
    columns = {
        field: column_of_tensor(node, field, Unit(unit), value, batch, seqs)
        for (field, unit), value in zip(signature.returns, results, strict=True)
    }
    return columns, metrics


def get_column(batch: Batch, name: str) -> Column:
    """Return a column by name.

    Raises:
        RunError: if the batch lacks it.
    """
    if name not in batch.columns:
        present = ", ".join(sorted(batch.columns)) or "nothing"
        raise RunError(f"a batch lacks {name!r}; it has {present}{nearest(name, batch.columns)}")
    return batch.columns[name]


def to_tensor(values: Any, device: torch.device | str) -> Tensor:
    """Return a numpy column as a tensor: floats in fp32, integers in int64, booleans unchanged."""
    array = np.asarray(values)
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    elif array.dtype.kind in "iu":
        array = array.astype(np.int64, copy=False)
    if not array.flags.writeable:  # it is in shared memory of the object store
        array = array.copy()
    return to_device(torch.from_numpy(array), device)


def column_of_read(read: Read, batch: Batch) -> Column:
    """Return the column of a field that a body reads.

    Raises:
        RunError: if the batch lacks it.
    """
    qualified = f"{read.stream}/{read.field}"
    return get_column(batch, qualified if qualified in batch.columns else read.field)


def tensordict_entry(read: Read, batch: Batch, seqs: Sequences, computed: Tensor | None) -> Tensor:
    """Return a field as an entry of a TensorDict: jagged `[S, tokens]` per token, else `[S]`.

    A field that is stored per token is not copied, so floats at unlearned tokens are as they were returned.
    """
    if computed is not None:
        values, unit = computed, Unit.TOKEN
    else:
        column = column_of_read(read, batch)
        values, unit = to_tensor(column.values, seqs.index.device), column.unit
    if read.unit is not Unit.TOKEN:
        return values
    packed = values if unit is Unit.TOKEN else values[seqs.index]
    return torch.nested.nested_tensor_from_jagged(packed, offsets=seqs.offsets)


def _argument(read: Read, source: Column, seqs: Sequences) -> Any:
    """Return a column with the reader's unit: values are repeated, and floats are 0 at unlearned tokens."""
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
    """Return the row of the first member of each group `[P]`."""
    rows = torch.arange(len(seqs), device=seqs.group.device)
    start = rows.new_full((seqs.num_groups,), len(seqs))
    return start.scatter_reduce(0, seqs.group, rows, "amin")
