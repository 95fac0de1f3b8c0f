"""Rows of the datasets that streams read, with the units that the recipe declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.base.errors import DataError
from hflow.data.rows.datasets import DataSettings, open_dataset
from hflow.data.text.messages import read_as
from hflow.planner.plan.rows import Plan
from hflow.types import Unit
from hflow.workers.interface import NodeProgram


class DatasetRow(dict[str, tuple[Unit, Any]]):
    """Dataset column -> its unit and value.

    Attributes:
        where: the row's file and number, for errors.
    """

    where: str = ""


class DatasetReader:
    """Reads dataset rows by stream; opens every dataset once per process."""

    def __init__(self, plan: Plan, settings: Mapping[str, DataSettings]) -> None:
        self._units = {dataset.name: dict(dataset.columns) for dataset in plan.graph.datasets}
        self._dataset_of = {s.name: s.dataset for s in plan.graph.streams if s.dataset is not None}
        self._datasets = {
            name: open_dataset(settings[name], self._units[name]) for name in set(self._dataset_of.values())
        }

    def row(self, stream: str, index: int) -> DatasetRow:
        """Return a row of the dataset that feeds a stream.

        Raises:
            DataError: when the row does not have the columns that the recipe declares.
        """
        name = self._dataset_of[stream]
        units = self._units[name]
        source = self._datasets[name]
        row = DatasetRow((column, (units[column], value)) for column, value in source.row(index).items())
        row.where = source.where(index)
        return row


def body_arguments(program: NodeProgram, row: DatasetRow) -> dict[str, Any]:
    """Return a source's arguments from a dataset row, by parameter."""
    return {
        read.parameter: read_as(row[read.field][1], row[read.field][0], read.unit) for read in program.reads
    }


def row_error(row: DatasetRow, error: DataError) -> DataError:
    """Return a `DataError` of a source's body, with the file and number of the row that caused it."""
    return DataError(f"{row.where}: {error}")
