"""Metrics of a step: means (or max, min, sum) over all valid entries of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.backends.common.inputs import PackedBatch
from hflow.data.unpack_returns import metric_tensor, num_entries
from hflow.errors import RunError
from hflow.types import Unit

_UNITS = (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP)
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}
_REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.sum,  # means are kept as sums until the counts of all ranks are known
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
}


class MetricAccumulator:
    """Accumulates on the device; nothing waits for it until `finish`."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, node: str, metrics: Mapping[str, Any], packed: PackedBatch, unit: Unit) -> None:
        """Take one micro-batch's metrics.

        A tensor `[T]`, `[S]` or `[P]` is taken entry by entry. A single number stands for all
        entries of `unit`, the loss's, in this micro-batch.

        Raises:
            RunError: when a tensor has none of these shapes.
        """
        for name, value in metrics.items():
            x = metric_tensor(node, name, value).to(packed.input_ids.device).float()
            at = unit if x.dim() == 0 else _unit_of(node, name, x, packed, unit)
            if packed.counts[at] > 0:
                entries = x.expand(len(packed.valid[at])) if x.dim() == 0 else x
                how = _how(name)
                entries = entries.masked_fill(~packed.valid[at], _NEUTRAL[how])
                self._merge(name, _REDUCE[how](entries), packed.counts[at])

    def _merge(self, name: str, value: Tensor, count: int) -> None:
        if name in self._values:
            value = _REDUCE[_how(name)](torch.stack([self._values[name], value]))
        self._values[name] = value
        self._counts[name] = self._counts.get(name, 0) + count

    def finish(self, group: ProcessGroup | None, shares: Mapping[str, float]) -> dict[str, float]:
        """Combine with the other ranks (a collective) and return plain numbers.

        Args:
            group: the other ranks; None when there are none.
            shares: this rank's part of numbers that are summed over ranks.
        """
        numbers = torch.stack(list(self._values.values())).tolist() if self._values else []
        mine = {name: (x, self._counts[name]) for name, x in zip(self._values, numbers, strict=True)}
        everyone: list[Any] = [(mine, shares)]
        if group is not None:
            everyone = [None] * group.size()
            dist.all_gather_object(everyone, (mine, shares), group=group)
        sums = {name: sum(theirs[name] for _, theirs in everyone) for name in shares}
        return _combine([theirs for theirs, _ in everyone]) | sums


def _combine(parts: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Join what each rank accumulated; a rank that had nothing to do lacks names."""
    result = {}
    for name in sorted({name for part in parts for name in part}):
        have = [part[name] for part in parts if name in part]
        how = _how(name)
        if how in ("max", "min"):
            result[name] = (max if how == "max" else min)(x for x, _ in have)
        else:
            total = sum(x for x, _ in have)
            result[name] = total if how == "sum" else total / sum(count for _, count in have)
    return result


def _how(name: str) -> str:
    suffix = name.rpartition(".")[2]
    return suffix if suffix in ("max", "min", "sum") else "mean"


def _unit_of(node: str, name: str, x: Tensor, packed: PackedBatch, unit: Unit) -> Unit:
    """The unit whose length a metric has; the loss's where several have it."""
    fitting = [u for u in (unit, *_UNITS) if list(x.shape) == [num_entries(u, packed.seqs)]]
    if not fitting:
        raise RunError(
            f"node {node!r}: metric {name!r} has shape {list(x.shape)}; it must be one number or have an "
            f"entry for each token, sequence or group"
        )
    return fitting[0]
