"""Questions about the samples of a run, in SQL on the view `samples`; nothing can be written by them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.errors import ConfigError
from hflow.runtime.ledger.schema import COLUMNS, LARGEST, open_ledger

ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}


@dataclass(frozen=True)
class Found:
    """Samples that were asked for."""

    rows: tuple[tuple[Any, ...], ...]
    """A value for each of `COLUMNS`."""
    total: int
    """How many there are, beyond the limit too."""

    def to_json(self) -> list[dict[str, Any]]:
        """One object a sample."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]


def select(path: Path, where: str | None = None, limit: int | None = None) -> Found:
    """Samples by stream and id.

    Args:
        path: of the ledger.
        where: SQL on the columns of `samples`; None: all.
        limit: rows at most.

    Raises:
        ConfigError: when there is no ledger, or the SQL is none.
    """
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    with _asking(path, where) as database:
        rows = database.execute(
            f"SELECT {names} FROM samples {_where(where)} ORDER BY stream, id LIMIT ?",
            (-1 if limit is None else min(limit, LARGEST),),
        ).fetchall()
        total = len(rows) if limit is None or len(rows) < limit else _count(database, where)
    return Found(tuple(rows), total)


def count(path: Path, where: str | None = None) -> int:
    """How many samples there are; arguments and errors as of `select`."""
    with _asking(path, where) as database:
        return _count(database, where)


def _count(database: sqlite3.Connection, where: str | None) -> int:
    (found,) = database.execute(f"SELECT COUNT(*) FROM samples {_where(where)}").fetchone()
    return int(found)


def _where(where: str | None) -> str:
    return "" if where is None else f"WHERE (\n{where}\n)"


@contextmanager
def _asking(path: Path, where: str | None) -> Iterator[sqlite3.Connection]:
    """A connection that only reads, and says what is wrong with the user's SQL."""
    database = open_ledger(path)
    database.set_authorizer(_authorize)
    try:
        yield database
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise ConfigError(f"--where {where!r}: {error}; the columns are {', '.join(COLUMNS)}") from error
    finally:
        database.close()


def _authorize(action: int, *_: str | None) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY
