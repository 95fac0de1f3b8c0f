"""Rows that a function of the recipe yields (`@rows`), by index."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hflow.base.errors import DataError, reason_of
from hflow.data.rows.row_schema import RowSchema

ENDLESS = sys.maxsize
"""The number of rows of a function: it is not known whether it ends."""
NUM_KEPT = 10_000
"""The last rows, which are kept. An earlier one is made again, with all rows before it."""


class GeneratedRows:
    """The rows of a function in the order in which it yields them.

    Row `index` depends on the index only, as every call of the function yields the same rows. So any worker
    can read any row, and a run resumes at a position.

    Args:
        split: the argument `split`, if it has such a parameter.
        arguments: all other arguments.

    Raises:
        DataError: if the arguments do not fit.
    """

    files: tuple[Path, ...] = ()
    """It has none."""

    def __init__(
        self, function: Callable[..., Any], split: str, arguments: Mapping[str, Any], schema: RowSchema
    ) -> None:
        self._function = function
        self._schema = schema
        self._lock = threading.Lock()
        given = dict(arguments)
        signature = inspect.signature(function)
        if "split" in signature.parameters:
            given.setdefault("split", split)
        try:
            signature.bind(**given)
        except TypeError as error:
            raise DataError(
                f"{schema.key}.arguments do not fit {function.__name__}{signature}: {error}"
            ) from error
        self._arguments = given
        self._begin()

    def __len__(self) -> int:
        return ENDLESS

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`.

        Raises:
            DataError: if the function has ended before, raises, or yields something else than the columns.
        """
        with self._lock:
            if index < self._num_made - len(self._kept):
                self._begin()
            while self._num_made <= index:
                self._kept.append(self._next_row())
                self._num_made += 1
            row = self._kept[index - self._num_made]
        where = self.where(index)
        if not isinstance(row, Mapping):
            raise DataError(f"{where} is a {type(row).__name__}; yield a dict of columns")
        self._schema.check(row, where)
        return self._schema.row(dict(row), where)

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"{self._function.__name__}(), row {index}"

    def check(self, num_rows: int) -> None:
        """Read the first rows, and check that another call yields the same.

        Raises:
            DataError: if it does not, and for the reasons of `row`.
        """
        again = GeneratedRows(self._function, "", self._arguments, self._schema)
        for index in range(num_rows):
            if self.row(index) != again.row(index):
                raise DataError(
                    f"{self.where(index)} is another one in each call, but every worker must read the same; "
                    "draw from a random.Random(0) that the function makes, not from a global generator"
                )

    def _begin(self) -> None:
        self._rows: Iterator[Any] = self._function(**self._arguments)
        self._kept: deque[Any] = deque(maxlen=NUM_KEPT)
        self._num_made = 0

    def _next_row(self) -> Any:
        name, number = self._function.__name__, self._num_made
        try:
            return next(self._rows)
        except StopIteration:
            fix = f"set {self._schema.key}.limit={number} to read them again in each epoch"
            raise DataError(
                f"{name}() has ended after {number} rows; {fix if number else 'yield some'}"
            ) from None
        except Exception as error:
            raise DataError(f"{self.where(number)}: {type(error).__name__}: {reason_of(error)}") from error
