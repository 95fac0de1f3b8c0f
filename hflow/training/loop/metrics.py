"""Metrics of a train step: means (or max, min, sum) over all valid entries of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.base.errors import RunError
from hflow.data.batches.device_copy import to_device
from hflow.data.batches.unpack_returns import metric_tensor, num_entries
from hflow.training.loop.inputs import PackedBatch
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
    """Accumulates metrics on the device, without synchronising with it until `finish`.

    A metric's name decides its reduction: `.max`, `.min` or `.sum` by its suffix, else the mean.

    Attributes:
        num_computed: tokens that passed through the model on this rank.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self.num_computed = 0

    def add(self, node: str, metrics: Mapping[str, Any], packed: PackedBatch, unit: Unit) -> None:
        """Add one micro-batch's metrics.

        A tensor `[T]`, `[S]` or `[P]` counts entry by entry. A single number counts once for every valid
        entry of `unit`, the loss's unit.

        Raises:
            RunError: if a tensor has none of these shapes.
        """
        self.num_computed += len(packed.computed_ids)
        for name, value in metrics.items():
            x = to_device(metric_tensor(node, name, value), packed.input_ids.device).float()
            at = unit if x.dim() == 0 else _unit_of(node, name, x, packed, unit)
            if packed.num_valid[at] > 0:
                entries = x.expand(len(packed.valid[at])) if x.dim() == 0 else x
                reduction = _reduction(name)
                entries = entries.masked_fill(~packed.valid[at], _NEUTRAL[reduction])
                self._merge(name, _REDUCE[reduction](entries), packed.num_valid[at])

    def add_entries(self, name: str, entries: Tensor) -> None:
        """Add entries `[N]` of one metric that all count; N > 0."""
        self._merge(name, _REDUCE[_reduction(name)](entries), len(entries))

    def add_sum(self, name: str, total: Tensor, count: int) -> None:
        """Add entries of a mean, given their sum and number; `count` > 0."""
        self._merge(name, total, count)

    def merge(self, other: MetricAccumulator) -> None:
        """Add what another one has accumulated on this rank."""
        self.num_computed += other.num_computed
        for name, value in other._values.items():
            self._merge(name, value, other._counts[name])

    def num_entries(self, name: str) -> int:
        """Return the number of entries of a metric that this rank has added."""
        return self._counts.get(name, 0)

    def _merge(self, name: str, value: Tensor, count: int) -> None:
        if name in self._values:
            value = _REDUCE[_reduction(name)](torch.stack([self._values[name], value]))
        self._values[name] = value
        self._counts[name] = self._counts.get(name, 0) + count

    def finish(self, group: ProcessGroup | None, sums: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Combine the metrics of all ranks and return plain numbers; a collective.

        `sums` are this rank's part of further numbers, which are summed over the ranks.
        """
        on_device = [x for x in sums.values() if isinstance(x, Tensor)]
        numbers = iter(_numbers([*self._values.values(), *on_device]))
        local_metrics = {name: (next(numbers), self._counts[name]) for name in self._values}
        local_sums = {name: next(numbers) if isinstance(x, Tensor) else x for name, x in sums.items()}
        by_rank: list[Any] = [(local_metrics, local_sums)]
        if group is not None:
            by_rank = [None] * group.size()
            dist.all_gather_object(by_rank, (local_metrics, local_sums), group=group)
        totals = {name: sum(rank_sums[name] for _, rank_sums in by_rank) for name in sums}
        return _combine([metrics for metrics, _ in by_rank]) | totals


def _numbers(scalars: Sequence[Tensor]) -> list[float]:
    """Return scalars of one device as numbers, in one transfer."""
    return [float(x) for x in torch.stack(list(scalars)).tolist()] if scalars else []  # waits: once per step


def _combine(by_rank: list[dict[str, tuple[float, int]]]) -> dict[str, float]:
    """Combine the (value, count) of every rank; a rank without samples lacks names."""
    result = {}
    for name in sorted({name for metrics in by_rank for name in metrics}):
        pairs = [metrics[name] for metrics in by_rank if name in metrics]
        reduction = _reduction(name)
        if reduction in ("max", "min"):
            result[name] = (max if reduction == "max" else min)(x for x, _ in pairs)
        else:
            total = sum(x for x, _ in pairs)
            result[name] = total if reduction == "sum" else total / sum(count for _, count in pairs)
    return result


def _reduction(name: str) -> str:
    suffix = name.rpartition(".")[2]
    return suffix if suffix in ("max", "min", "sum") else "mean"


def _unit_of(node: str, name: str, x: Tensor, packed: PackedBatch, unit: Unit) -> Unit:
    """Return the unit whose length a metric has; the loss's unit if several have it."""
    fitting = [u for u in (unit, *_UNITS) if list(x.shape) == [num_entries(u, packed.seqs)]]
    if not fitting:
        raise RunError(
            f"node {node!r}: metric {name!r} has shape {list(x.shape)}; return one number, or one entry per "
            f"token, sequence or group"
        )
    return fitting[0]
