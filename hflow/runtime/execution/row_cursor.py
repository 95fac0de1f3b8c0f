"""Which row of its dataset each group of a stream reads."""

from __future__ import annotations

from typing import Protocol


class DatasetRows(Protocol):
    """The order in which a stream reads its dataset.

    The order is a pure function of the position, so that a run can resume at any position.
    """

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def row(self, position: int) -> int:
        """Return the row at a position. Positions beyond the dataset are in the next epoch."""
        ...


class RowCursor:
    """Maps the ascending group ids of one stream to rows.

    Args:
        rows: the order of the rows.
        endless: True for the trained stream, which reads epoch after epoch. A side stream reads its
            dataset once per evaluation; groups beyond its end have no row.
        first_group: the group that reads the first row.
    """

    def __init__(self, rows: DatasetRows, endless: bool, first_group: int = 0) -> None:
        self._rows = rows
        self._endless = endless
        self._first_group = first_group

    def row(self, group: int) -> int | None:
        """Return the row of a group; None if the evaluation has no more rows."""
        position = group - self._first_group
        if self._endless or position < self._rows.num_rows:
            return self._rows.row(position)
        return None

    def restart(self) -> None:
        """Let the next group read the first row. Called when an evaluation is over."""
        self._first_group += self._rows.num_rows
