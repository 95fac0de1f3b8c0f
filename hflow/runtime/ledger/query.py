"""Queries on a run's ledger, none of which can write anything.

`select` runs SQL on the view `samples`. `read_overview` tells what a run refused and why, how often it went
back, and some of its samples.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, shorten
from hflow.runtime.ledger.schema import COLUMNS, MAX_INTEGER, has_rewinds, reading, select_samples, survives

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


MAX_COUNTED = 1_000_000
"""Samples beyond the limit that `select` counts at most."""


@dataclass(frozen=True)
class QueryResult:
    """The samples that a query found."""

    rows: tuple[tuple[Any, ...], ...]
    """A value for each of `COLUMNS`."""
    total: int
    """How many the query found, including those beyond the limit."""
    is_exact: bool = True
    """False: there may be more than `total`, which are not counted."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per sample."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]


def select(
    path: Path,
    where: str | None = None,
    limit: int | None = None,
    among: Iterable[tuple[str, int]] | None = None,
) -> QueryResult:
    """Return at most `limit` samples, sorted by stream and id.

    `where` is an SQL condition on the columns of `samples`, and `among` names samples by stream and id. None
    means all samples, or no limit.

    Raises:
        ConfigError: when there is no ledger, or the SQL is invalid.
    """
    rows: list[tuple[Any, ...]] = []
    with _reading(path, where, among) as database:
        query = _Query(database, where, is_among=among is not None)
        for (stream,) in database.execute("SELECT id FROM streams ORDER BY name").fetchall():
            rows += query.rows(stream, -1 if limit is None else min(limit, MAX_INTEGER) - len(rows))
        is_whole = limit is None or len(rows) < limit
        total = len(rows) if is_whole else query.count(MAX_COUNTED)
    return QueryResult(tuple(rows), max(total, len(rows)), is_whole or total < MAX_COUNTED)


def count(path: Path, where: str | None = None) -> int:
    """Return the number of samples. Arguments and errors are those of `select`."""
    with _reading(path, where) as database:
        return _Query(database, where).count()


class _Query:
    """A condition on samples, as SQL that reads no more tables than it needs."""

    def __init__(self, database: sqlite3.Connection, where: str | None, *, is_among: bool = False) -> None:
        self._database = database
        self._has_rewinds = has_rewinds(database)
        self._where = "" if where is None else f"WHERE (\n{where}\n)"
        words = set(re.findall(r"\w+", (where or "").lower()))
        self._named = [name for name in COLUMNS if name in words]
        self._among = "i.sample IN (SELECT id FROM chosen WHERE stream = s.name)" if is_among else "1"

    def rows(self, stream: int, limit: int) -> list[tuple[Any, ...]]:
        """Return all columns of a stream's samples, sorted by id."""
        source = self._source(COLUMNS, f"s.id = {stream}")
        return self._database.execute(
            f"SELECT * FROM ({source}) AS samples {self._where} ORDER BY id LIMIT {limit}"
        ).fetchall()

    def count(self, most: int = -1) -> int:
        """Return the number of samples, up to `most`; -1: of all."""
        source = self._source(self._named or ["id"], "1")
        limited = f"SELECT 1 FROM ({source}) AS samples {self._where} LIMIT {most}"
        whole = f"SELECT COUNT(*) FROM ({source}) AS samples {self._where}"
        sql = whole if most < 0 else f"SELECT COUNT(*) FROM ({limited})"
        (num_samples,) = self._database.execute(sql).fetchone()
        return int(num_samples)

    def _source(self, columns: Iterable[str], condition: str) -> str:
        chosen = select_samples(columns, self._named, has_rewinds=self._has_rewinds)
        return f"{chosen} AND {condition} AND {self._among}"


@contextmanager
def _reading(
    path: Path, where: str | None, among: Iterable[tuple[str, int]] | None = None
) -> Iterator[sqlite3.Connection]:
    """Open a connection that cannot write; errors in the user's SQL become `ConfigError`."""
    with reading(path) as database:
        if among is not None:
            database.execute("CREATE TEMP TABLE chosen (stream TEXT, id INTEGER, PRIMARY KEY (stream, id))")
            database.executemany("INSERT INTO chosen VALUES (?, ?)", among)
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


MAX_SAMPLES = 160
"""Samples of each stream that an overview holds: whole groups, at equal distances over the run."""


@dataclass(frozen=True)
class RefusedRow:
    """Samples that were refused or dropped for one reason."""

    stream: str
    node: str
    kind: str
    """`refused` or `dropped`."""
    reason: str
    count: int
    message: str
    """One of the errors; empty if there is none."""


@dataclass(frozen=True)
class RewindRow:
    """The run went back to a checkpoint."""

    step: int
    """Completed steps of the checkpoint."""
    steps_lost: int
    """Steps that had been completed after it."""


@dataclass(frozen=True)
class LedgerOverview:
    """What a report shows of a ledger."""

    ends: Mapping[str, int]
    """End -> samples; those without an end are `in flight`."""
    refused: tuple[RefusedRow, ...]
    """The most frequent first."""
    rewinds: tuple[RewindRow, ...]
    samples: tuple[Mapping[str, Any], ...]
    """Column -> value, of the chosen samples or of whole groups at equal distances over the run."""


def read_overview(path: Path, among: Collection[tuple[str, int]] = (), num_newest: int = 0) -> LedgerOverview:
    """Return the overview of a ledger, also while its run writes it.

    Args:
        among: stream and id of the samples to return; empty: some of all.
        num_newest: also return so many samples that finished last, and these before all others.

    Raises:
        ConfigError: when there is no ledger, or it is damaged.
    """
    with reading(path) as database:
        went_back = has_rewinds(database)
        (num_issued,), (num_ended,) = (
            database.execute(
                f"SELECT COUNT(*) FROM {table} AS t WHERE {survives('t') if went_back else 1}"
            ).fetchone()
            for table in ("issued", "ends")
        )
        others = database.execute(  # few, so that the rows of trained samples need no sorting
            f"""
            SELECT s.name, COALESCE(n.name, ''), e.kind, COALESCE(e.reason, ''), COUNT(*),
                COALESCE(MAX(e.message), '')
            FROM ends AS e JOIN streams AS s ON s.id = e.stream LEFT JOIN nodes AS n ON n.id = e.node
            WHERE e.kind <> 'trained' AND {survives("e") if went_back else 1}
            GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC"""
        ).fetchall()
        refused = [row for row in others if row[2] in ("refused", "dropped")]
        ends = Counter({"trained": num_ended - sum(row[4] for row in others)})
        for _, _, kind, _, number, _ in others:
            ends[kind] += number
        in_flight = num_issued - num_ended
        rewinds = database.execute(
            """
            SELECT r.step, COALESCE((SELECT MAX(s.step) + 1 FROM steps AS s WHERE s.seq < r.seq
                AND NOT EXISTS (SELECT 1 FROM rewinds AS w WHERE w.seq < r.seq AND s.seq > w.position
                    AND s.seq < w.seq)), r.step) - r.step
            FROM rewinds AS r ORDER BY r.seq"""
        ).fetchall()
        newest = _newest(database, num_newest)
        chosen = {*among, *newest}
        samples = select(path, among=chosen).to_json() if chosen else _samples(database)
        if num_newest:
            samples.sort(key=lambda row: row["finished_at"] or 0.0, reverse=True)
        return LedgerOverview(
            ends={**dict((+ends).most_common()), **({"in flight": in_flight} if in_flight else {})},
            refused=tuple(RefusedRow(*row) for row in refused),
            rewinds=tuple(RewindRow(step, max(0, lost)) for step, lost in rewinds),
            samples=tuple(samples),
        )


def _newest(database: sqlite3.Connection, number: int) -> list[tuple[str, int]]:
    """Return stream and id of the samples that finished last. Ids ascend in the order of admission."""
    found: list[tuple[int, str, int]] = []
    for stream, name, size in database.execute("SELECT id, name, group_size FROM streams").fetchall():
        rows = database.execute(
            f"SELECT f.seq, f.sample FROM finished AS f WHERE f.stream = ? AND {survives('f')} "
            "ORDER BY f.sample DESC LIMIT ?",
            (stream, number * size),
        )
        found += [(seq, name, sample) for seq, sample in rows]
    return [(name, sample) for _, name, sample in sorted(found, reverse=True)[:number]]


def _samples(database: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return whole groups of each stream, at equal distances. Group g has the ids from g * size."""
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    found: list[dict[str, Any]] = []
    for stream, name, size in database.execute(
        "SELECT id, name, group_size FROM streams ORDER BY is_trained DESC, id"
    ).fetchall():
        (last,) = database.execute("SELECT MAX(sample) FROM issued WHERE stream = ?", (stream,)).fetchone()
        num_groups = 0 if last is None else last // size + 1
        distance = max(1, -(-num_groups * size // MAX_SAMPLES))
        for group in range(max(0, num_groups - 1) % distance, num_groups, distance):
            rows = database.execute(
                f"SELECT {names} FROM samples WHERE stream = ? AND id BETWEEN ? AND ? ORDER BY id",
                (name, group * size, (group + 1) * size - 1),
            )
            found += [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return found
