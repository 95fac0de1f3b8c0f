"""Queries on the samples of a run: SQL on the view `samples`, which cannot write anything."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.errors import ConfigError
from hflow.runtime.ledger.schema import COLUMNS, MAX_INTEGER, open_ledger

ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


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


def select(path: Path, where: str | None = None, limit: int | None = None) -> QueryResult:
    """Return samples, sorted by stream and id.

    Args:
        path: path of the ledger.
        where: SQL condition on the columns of `samples`; None: all samples.
        limit: the most rows to return; None: no limit.

    Raises:
        ConfigError: when there is no ledger, or the SQL is invalid.
    """
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    with _reading(path, where) as database:
        rows = database.execute(
            f"SELECT {names} FROM samples {_where(where)} ORDER BY stream, id LIMIT ?",
            (-1 if limit is None else min(limit, MAX_INTEGER),),
        ).fetchall()
        total = len(rows) if limit is None or len(rows) < limit else _count(database, where)
    return QueryResult(tuple(rows), total)


def count(path: Path, where: str | None = None) -> int:
    """Return the number of samples. Arguments and errors are those of `select`."""
    with _reading(path, where) as database:
        return _count(database, where)


def _count(database: sqlite3.Connection, where: str | None) -> int:
    (num_samples,) = database.execute(f"SELECT COUNT(*) FROM samples {_where(where)}").fetchone()
    return int(num_samples)


def _where(where: str | None) -> str:
    return "" if where is None else f"WHERE (\n{where}\n)"


@contextmanager
def _reading(path: Path, where: str | None) -> Iterator[sqlite3.Connection]:
    """Open a connection that cannot write; errors in the user's SQL become `ConfigError`."""
    database = open_ledger(path)
    database.set_authorizer(_authorize)
    try:
        yield database
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ConfigError(f"--where {where!r}: {error}; the columns are {', '.join(COLUMNS)}") from error
    finally:
        database.close()


def _authorize(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED_ACTIONS else sqlite3.SQLITE_DENY
