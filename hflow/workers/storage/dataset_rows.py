"""Rows of the streams' datasets, with the units that the recipe declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.data.datasets import DataSettings, open_dataset
from hflow.errors import DataError
from hflow.planner.ir import Plan
from hflow.types import Unit
from hflow.workers.interface import GroupOrder

DatasetRow = Mapping[str, tuple[Unit, Any]]
"""Dataset column -> its unit and value."""


class DatasetRows:
    """Opens every dataset that a stream reads, once per process."""

    def __init__(self, plan: Plan, settings: Mapping[str, DataSettings]) -> None:
        self._units = {dataset.name: dict(dataset.columns) for dataset in plan.graph.datasets}
        self._dataset = {s.name: s.dataset for s in plan.graph.streams if s.dataset is not None}
        self._open = {
            name: open_dataset(settings[name], self._units[name]) for name in set(self._dataset.values())
        }

    def row(self, stream: str, index: int) -> DatasetRow:
        """A row of the dataset that feeds a stream.

        Raises:
            DataError: when the row is not what the recipe declares.
        """
        name = self._dataset[stream]
        units = self._units[name]
        return {column: (units[column], value) for column, value in self._open[name].row(index).items()}


def row_error(plan: Plan, order: GroupOrder, error: DataError) -> DataError:
    """What a source's body says of a row that it cannot read, with the row's dataset and number."""
    dataset = plan.graph.stream(order.stream).dataset
    return DataError(f"data.{dataset} row {order.row}: {error}")
