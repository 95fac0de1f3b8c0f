"""TensorDicts of a batch: made for bodies that ask for one, and taken from bodies that return one.

The library `tensordict` is an extra. It is imported when a body asks for a TensorDict.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hflow.base.errors import ReturnError, nearest
from hflow.types import Sequences, Unit

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
    offsets: Tensor = entries[field].offsets().to(seqs.offsets.device)
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
