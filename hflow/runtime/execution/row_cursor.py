"""Which row of its dataset each group of a stream reads."""

from __future__ import annotations

from typing import Protocol


class Rows(Protocol):
    """The order in which a stream reads its dataset: pure, so that a position can be resumed."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def row(self, position: int) -> int:
        """The row at a position; positions beyond the dataset start the next epoch."""
        ...


class RowCursor:
    """Maps the group ids of one stream, which ascend, to rows.

    The trained stream goes on for ever, epoch after epoch. A side stream reads its dataset once
    per evaluation; groups beyond its end have no row.
    """

    def __init__(self, rows: Rows, endless: bool) -> None:
        self._rows = rows
        self._endless = endless
        self._base = 0
        self._next = 0

    def row(self, group: int) -> int | None:
        """The row of a group, or None where the evaluation has no more."""
        position = group - self._base
        self._next = group + 1
        if self._endless or position < self._rows.num_rows:
            return self._rows.row(position)
        return None

    def restart(self) -> None:
        """An evaluation is over: the next group reads the first row."""
        self._base = self._next
