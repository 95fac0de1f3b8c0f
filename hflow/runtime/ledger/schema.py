"""The ledger's file: its tables, to which rows are only appended, and the view that users query.

Every row has a `seq`, the order in which the controller learned of things. It learns of all samples of a
group at once, so these share one. Times are milliseconds since the run's start. A sample is identified by
its stream and its id. Tables are clustered by sample, so that they need no index.

issued      a sample was admitted: row of the dataset, worker, version of the engine's weights
drawn       why a sampler chose the row of a group
restarted   it was in flight on a worker that failed, and begins again on the process that took its place; or
            its episode was interrupted, and was replayed or began again
finished    its source is done: its tokens
segments    consecutive tokens that one version generated
trajectories
            the members of a sample whose episode returned a list
computed    a node is done with a sample or group: when, and the number that it gave
accepted    the remaining members of its group passed all nodes
batches     the batch of a step was formed (on a side stream: the evaluation of a version is over)
ends        one row per sample: trained, evaluated, refused, dropped or unused
steps       a step is complete
commits     all ranks of a generation replica hold a version of the weights, with this checksum (digest)
rewinds     the run went back to `step` completed steps: of the rows written before, those after `position`
            (a `seq`) do not belong to its history any more
closings    the run ended, and how
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from hflow.base.errors import ConfigError

FORMAT = 3

MAX_INTEGER = 2**63 - 1
"""The largest integer that the file can hold."""

TABLES = """
CREATE TABLE about (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE streams (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, source TEXT NOT NULL, dataset TEXT,
    group_size INTEGER NOT NULL, is_trained INTEGER NOT NULL, ages INTEGER NOT NULL, judge INTEGER);
CREATE TABLE nodes (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, stream INTEGER NOT NULL, per_group INTEGER NOT NULL,
    field TEXT, place TEXT);
CREATE TABLE issued (
    stream INTEGER, sample INTEGER, seq INTEGER, time INTEGER,
    group_id INTEGER NOT NULL, row INTEGER NOT NULL, worker INTEGER NOT NULL, version INTEGER NOT NULL,
    PRIMARY KEY (stream, sample, seq)) WITHOUT ROWID;
CREATE TABLE restarted (
    stream INTEGER, sample INTEGER, seq INTEGER, time INTEGER, reason TEXT NOT NULL,
    PRIMARY KEY (stream, sample, seq)) WITHOUT ROWID;
CREATE TABLE finished (
    stream INTEGER, sample INTEGER, seq INTEGER, time INTEGER, length INTEGER NOT NULL,
    tokens INTEGER NOT NULL, turns INTEGER NOT NULL, oldest INTEGER, newest INTEGER,
    PRIMARY KEY (stream, sample, seq)) WITHOUT ROWID;
CREATE TABLE segments (
    stream INTEGER, sample INTEGER, seq INTEGER, number INTEGER,
    version INTEGER NOT NULL, tokens INTEGER NOT NULL,
    PRIMARY KEY (stream, sample, seq, number)) WITHOUT ROWID;
CREATE TABLE computed (
    node INTEGER, key INTEGER, seq INTEGER, time INTEGER, value REAL,
    PRIMARY KEY (node, key, seq)) WITHOUT ROWID;
CREATE TABLE accepted (
    stream INTEGER, sample INTEGER, seq INTEGER, time INTEGER,
    PRIMARY KEY (stream, sample, seq)) WITHOUT ROWID;
CREATE TABLE ends (
    stream INTEGER, sample INTEGER, seq INTEGER, time INTEGER,
    kind TEXT NOT NULL, step INTEGER, reason TEXT, node INTEGER, message TEXT,
    PRIMARY KEY (stream, sample, seq)) WITHOUT ROWID;
CREATE TABLE batches (seq INTEGER PRIMARY KEY, time INTEGER, stream INTEGER, step INTEGER NOT NULL);
CREATE TABLE steps (seq INTEGER PRIMARY KEY, time INTEGER, step INTEGER NOT NULL);
CREATE TABLE commits (
    seq INTEGER PRIMARY KEY, time INTEGER, replica TEXT NOT NULL, version INTEGER NOT NULL,
    digest TEXT NOT NULL);
CREATE TABLE rewinds (
    seq INTEGER PRIMARY KEY, time INTEGER, step INTEGER NOT NULL, position INTEGER NOT NULL);
CREATE TABLE closings (seq INTEGER PRIMARY KEY, time INTEGER, reason TEXT NOT NULL);
"""

LATER_TABLES = {
    "drawn": """
        stream INTEGER, group_id INTEGER, seq INTEGER, time INTEGER, reason TEXT NOT NULL,
        PRIMARY KEY (stream, group_id, seq)""",
    "trajectories": """
        stream INTEGER, sample INTEGER, seq INTEGER, number INTEGER, length INTEGER NOT NULL,
        tokens INTEGER NOT NULL, turns INTEGER NOT NULL, oldest INTEGER, newest INTEGER,
        PRIMARY KEY (stream, sample, seq, number)""",
}
"""Table that files of version 0.1 lack -> its columns."""


def create_later_tables(database: sqlite3.Connection, kind: Literal["TABLE", "TEMP TABLE"] = "TABLE") -> None:
    """Create those of `LATER_TABLES` that a ledger lacks; as temporary ones, to read it."""
    names = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    for name, columns in LATER_TABLES.items():
        if name not in names:
            database.execute(f"CREATE {kind} {name} ({columns}) WITHOUT ROWID")


NUM_COLUMNS = {
    "issued": 8,
    "drawn": 5,
    "restarted": 5,
    "finished": 9,
    "segments": 6,
    "trajectories": 9,
    "computed": 5,
    "accepted": 4,
    "ends": 9,
    "batches": 4,
    "steps": 3,
    "commits": 5,
    "rewinds": 4,
    "closings": 3,
}
"""Table that a run appends to -> its number of columns."""


def survives(alias: str) -> str:
    """Return SQL for whether a row belongs to the history, so that no rewind removed it."""
    return f"NOT EXISTS (SELECT 1 FROM rewinds AS w WHERE {alias}.seq > w.position AND {alias}.seq < w.seq)"


COLUMNS = {
    "id": ("i.sample", "the sample's id, unique within its stream"),
    "stream": ("s.name", "its stream"),
    "group_id": ("i.group_id", "its group: one prompt with its samples"),
    "row": ("i.row", "row of the dataset"),
    "worker": ("i.worker", "worker that generated or encoded it"),
    "version": ("NULLIF(i.version, -1)", "version of the engine's weights when it was admitted"),
    "issued_at": ("i.time / 1e3", "seconds from the run's start until it was admitted"),
    "finished_at": ("f.time / 1e3", "seconds from the run's start until its last token was generated"),
    "accepted_at": ("a.time / 1e3", "seconds from the run's start until its group had passed all nodes"),
    "ended_at": ("e.time / 1e3", "seconds from the run's start until its end"),
    "length": ("f.length", "all its tokens, including the prompt"),
    "tokens": ("f.tokens", "tokens that were generated, or are trained"),
    "turns": ("f.turns", "completions that its episode requested"),
    "oldest": ("f.oldest", "lowest version among its generated tokens"),
    "newest": ("f.newest", "highest version among its generated tokens"),
    "reward": ("c.value", "number that a node reported: the field reward, else score, else the last node's"),
    "end": ("e.kind", "trained, evaluated, refused, dropped, unused; null while it runs"),
    "reason": (
        "e.reason",
        "why it was refused, dropped or unused; nonfinite: trained, but in an update that was skipped",
    ),
    "node": ("n.name", "the node that refused it"),
    "place": ("n.place", "file and line of that node"),
    "message": ("e.message", "the error of that node, or more about the reason"),
    "step": (
        "CASE e.kind WHEN 'evaluated' THEN e.step ELSE e.step + 1 END",
        "step that trained it, counted from 1, version that was evaluated, or step that was being filled",
    ),
    "lag": (
        "CASE WHEN s.ages AND e.kind IN ('trained', 'evaluated', 'dropped') "
        "THEN e.step - COALESCE(f.oldest, NULLIF(i.version, -1)) END",
        "staleness: step - 1 - oldest",
    ),
    "in_flight_lag": (
        "CASE WHEN s.ages THEN f.newest - f.oldest END",
        "the part of lag that arose while it was generated",
    ),
    "in_queue_lag": (
        "CASE WHEN s.ages AND e.kind IN ('trained', 'evaluated', 'dropped') THEN e.step - f.newest END",
        "the part of lag that arose while it waited",
    ),
}
"""Column of the view `samples` -> (SQL, meaning)."""

_JOINED = {
    "f": "finished AS f ON f.stream = i.stream AND f.sample = i.sample",
    "a": "accepted AS a ON a.stream = i.stream AND a.sample = i.sample",
    "e": "ends AS e ON e.stream = i.stream AND e.sample = i.sample",
    "c": "computed AS c ON c.node = s.judge AND c.key = i.sample",
    "n": "nodes AS n ON n.id = e.node",
}
"""Alias -> the table with rows of some samples, and which."""


def select_samples(
    columns: Iterable[str] = COLUMNS, first: Iterable[str] = (), *, has_rewinds: bool = True
) -> str:
    """Return SQL for columns of all samples, from the tables that they need.

    Args:
        first: columns whose tables come first: a condition on them is decided before the others are read.
        has_rewinds: whether rows may not belong to the history; False saves half of the time.
    """
    used = " ".join(COLUMNS[name][0] for name in (*first, *columns))
    aliases = dict.fromkeys(re.findall(r"\b([facen])\.", used))
    if "n" in aliases:
        del aliases["n"]
        aliases = {**aliases, "e": None, "n": None}  # the node is that of the end
    joins = [
        f"LEFT JOIN {_JOINED[alias]}{f' AND {survives(alias)}' if has_rewinds and alias != 'n' else ''}"
        for alias in aliases
    ]
    shown = ", ".join(f'{COLUMNS[name][0]} AS "{name}"' for name in columns)
    where = f"WHERE {survives('i')}" if has_rewinds else "WHERE 1"
    return "\n".join(
        (f"SELECT {shown}", "FROM streams AS s CROSS JOIN issued AS i ON i.stream = s.id", *joins, where)
    )


VIEW = f"CREATE VIEW samples AS {select_samples()};"


def has_rewinds(database: sqlite3.Connection) -> bool:
    """Return whether the run went back, so that rows may not belong to its history."""
    return database.execute("SELECT 1 FROM rewinds").fetchone() is not None


def open_ledger(path: Path) -> sqlite3.Connection:
    """Open a ledger for reading, even while its run writes it.

    If no process has the ledger open, there is no write-ahead log, and it can be read on a read-only disk.

    Raises:
        ConfigError: when there is no ledger, or it has another format.
    """
    if not path.is_file():
        raise ConfigError(f"there is no ledger {path}. `hflow run` writes one into the run's directory.")
    is_open = path.with_name(f"{path.name}-wal").exists()
    options = "mode=ro" if is_open else "mode=ro&immutable=1"
    database = sqlite3.connect(f"file:{quote(str(path))}?{options}", uri=True)
    try:
        database.execute("BEGIN")  # all that is read is of one moment
        database.execute(VIEW.replace("CREATE", "CREATE TEMP", 1))  # older files have other columns
        create_later_tables(database, "TEMP TABLE")
        row = database.execute("SELECT value FROM about WHERE key = 'format'").fetchone()
        if row is not None and row[0] == FORMAT:
            database.execute(f"SELECT {', '.join(map(_quoted, COLUMNS))} FROM samples LIMIT 0")
            if database.execute("SELECT 1 FROM streams").fetchone() is None:
                raise sqlite3.DatabaseError("it names no streams")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        database.close()
        raise ConfigError(
            f"{path} is not a ledger of hflow, or damaged: {error}; name another run"
        ) from error
    if row is None or row[0] != FORMAT:
        database.close()
        found = "no format" if row is None else f"format {row[0]!r}"
        raise ConfigError(
            f"the ledger {path} has {found}, but this version of hflow reads format {FORMAT}. "
            "Use the version of hflow that wrote it."
        )
    return database


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a ledger for reading; what shows that the file is damaged becomes a `ConfigError`.

    Raises:
        ConfigError: for the reasons of `open_ledger`, and for rows that cannot be read.
    """
    with closing(open_ledger(path)) as database:
        try:
            yield database
        except ConfigError:
            raise
        except (sqlite3.Error, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"the ledger {path} is damaged: {error}; restore it, or name another run"
            ) from error


def _quoted(name: str) -> str:
    """Quote a column. SQLite reads an unknown name in double quotes as text."""
    return f"[{name}]"
