"""Queries on the samples of a run: SQL on the view `samples`, which cannot write anything."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, shorten
from hflow.runtime.ledger.schema import COLUMNS, MAX_INTEGER, reading

QUERY_SECONDS = 60
"""The longest time that a condition may take."""
_CHECKED_OPERATIONS = 100_000
"""Operations of SQLite's virtual machine between two looks at the clock. They take milliseconds."""
_LIMITS = {sqlite3.SQLITE_LIMIT_LENGTH: 10_000_000, sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000}
"""Bytes of the longest text that a condition may make, and of a pattern: longer ones take memory and time."""
_LONG_FUNCTIONS = ("format", "printf", "randomblob", "zeroblob")
"""Functions that can take minutes in one operation, which nothing interrupts."""
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


_SAMPLES = "samples"
_CHOSEN = "(SELECT samples.* FROM chosen JOIN samples USING (stream, id))"
"""The samples that a query chooses from."""


@dataclass(frozen=True)
class QueryResult:
    """The samples that a query found."""

    rows: tuple[tuple[Any, ...], ...]
    """A value for each of `COLUMNS`."""
    total: int
    """How many the query found, including those beyond the limit."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per sample."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]


def select(
    path: Path,
    where: str | None = None,
    limit: int | None = None,
    among: Iterable[tuple[str, int]] | None = None,
) -> QueryResult:
    """Return samples, sorted by stream and id.

    Args:
        path: path of the ledger.
        where: SQL condition on the columns of `samples`; None: all samples.
        limit: the most rows to return; None: no limit.
        among: stream and id of the samples to choose from; None: all.

    Raises:
        ConfigError: when there is no ledger, or the SQL is invalid.
    """
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    with _reading(path, where, among) as database:
        source = _SAMPLES if among is None else _CHOSEN
        rows = database.execute(
            f"SELECT {names} FROM {source} {_where(where)} ORDER BY stream, id LIMIT ?",
            (-1 if limit is None else min(limit, MAX_INTEGER),),
        ).fetchall()
        total = len(rows) if limit is None or len(rows) < limit else _count(database, where, source)
    return QueryResult(tuple(rows), total)


def count(path: Path, where: str | None = None) -> int:
    """Return the number of samples. Arguments and errors are those of `select`."""
    with _reading(path, where) as database:
        return _count(database, where)


def _count(database: sqlite3.Connection, where: str | None, source: str = _SAMPLES) -> int:
    (num_samples,) = database.execute(f"SELECT COUNT(*) FROM {source} {_where(where)}").fetchone()
    return int(num_samples)


def _where(where: str | None) -> str:
    return "" if where is None else f"WHERE (\n{where}\n)"


@contextmanager
def _reading(
    path: Path, where: str | None, among: Iterable[tuple[str, int]] | None = None
) -> Iterator[sqlite3.Connection]:
    """Open a connection that cannot write; errors in the user's SQL become `ConfigError`."""
    with reading(path) as database:
        if among is not None:
            database.execute("CREATE TEMP TABLE chosen (stream TEXT, id INTEGER, PRIMARY KEY (stream, id))")
            database.executemany("INSERT INTO chosen VALUES (?, ?)", among)
            database.commit()
        database.set_authorizer(_authorize)
        for limit, most in _LIMITS.items():
            database.setlimit(limit, most)
        if where is not None:
            end = time.monotonic() + QUERY_SECONDS
            database.set_progress_handler(lambda: time.monotonic() > end, _CHECKED_OPERATIONS)
        try:
            yield database
        except (sqlite3.Error, sqlite3.Warning, UnicodeEncodeError) as error:
            if where is None or getattr(error, "sqlite_errorcode", None) in _DAMAGE:
                raise
            raise ConfigError(_problem(where, error)) from error


def _problem(where: str, error: Exception) -> str:
    subject = f"--where {shorten(where, 200)!r}"
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
        return f"{subject} takes longer than {QUERY_SECONDS} s; use a simpler condition, without joins"
    return f"{subject}: {error}; the columns are {', '.join(COLUMNS)}"


def _authorize(action: int, _: str | None, function: str | None, *__: str | None) -> int:
    is_allowed = action in ALLOWED_ACTIONS and function not in _LONG_FUNCTIONS
    return sqlite3.SQLITE_OK if is_allowed else sqlite3.SQLITE_DENY
