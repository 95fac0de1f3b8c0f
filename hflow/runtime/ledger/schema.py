"""The ledger's file: its tables, append-only, and the one flat view that people ask.

Every row bears `seq`, the order in which the controller learned of things; a group's samples, which it
learns of together, share one. Times are milliseconds since the run's start. A sample is known by its
stream and its id. Tables are clustered by sample, so that they need no index beside themselves.

issued      a sample was admitted: row of the dataset, worker, version of the engine's weights
finished    its source is done: its tokens
segments    the runs of tokens that one version generated
computed    a node is done with a sample, or with a group: when, and the number that it gave
accepted    what was left of its group passed all nodes
batches     groups were bound to a step (a side stream's: its evaluation of a version is over)
ends        one row a sample: trained, evaluated, refused, dropped or unused
steps       a step is complete
commits     all ranks of a generation replica hold a version of the weights, which have this digest
rewinds     the run went back to `step` completed steps: of what was written before, rows after `position`
            (a `seq`) are no part of its history any more
closings    the run ended, and how
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

from hflow.errors import ConfigError

FORMAT = 2

LARGEST = 2**63 - 1
"""The largest number that the file can hold."""

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

APPENDED = {
    "issued": 8,
    "finished": 9,
    "segments": 6,
    "computed": 5,
    "accepted": 4,
    "ends": 9,
    "batches": 4,
    "steps": 3,
    "commits": 5,
    "rewinds": 4,
    "closings": 3,
}
"""Tables that a run appends to -> their number of columns."""


def survives(alias: str) -> str:
    """SQL: whether a row is part of the history that no rewind took back."""
    return f"NOT EXISTS (SELECT 1 FROM rewinds AS w WHERE {alias}.seq > w.position AND {alias}.seq < w.seq)"


def _joined(table: str, alias: str) -> str:
    return (
        f"LEFT JOIN {table} AS {alias} ON {alias}.stream = i.stream AND {alias}.sample = i.sample "
        f"AND {survives(alias)}"
    )


COLUMNS = {
    "id": ("i.sample", "the sample's id, unique within its stream"),
    "stream": ("s.name", "the stream that it belongs to"),
    "group_id": ("i.group_id", "its group: one prompt with its samples"),
    "row": ("i.row", "row of the dataset"),
    "worker": ("i.worker", "index of the worker that generated or encoded it"),
    "version": ("NULLIF(i.version, -1)", "version of the engine's weights when it was admitted"),
    "issued_at": ("i.time / 1e3", "seconds from the run's start to its admission"),
    "finished_at": ("f.time / 1e3", "... to its last token"),
    "accepted_at": ("a.time / 1e3", "... to the moment when it and its group had passed all nodes"),
    "ended_at": ("e.time / 1e3", "... to its end"),
    "length": ("f.length", "all its tokens, the prompt's included"),
    "tokens": ("f.tokens", "tokens that were generated, or are learned"),
    "turns": ("f.turns", "times that the model was asked to go on"),
    "oldest": ("f.oldest", "least version among its generated tokens"),
    "newest": ("f.newest", "greatest version among them"),
    "reward": ("c.value", "number that it was given: the field reward, else score, else the last one"),
    "end": ("e.kind", "trained, evaluated, refused, dropped, unused; null while it runs"),
    "reason": ("e.reason", "why it was refused, dropped or not used"),
    "node": ("n.name", "the node that refused it"),
    "place": ("n.place", "file and line of that node"),
    "message": ("e.message", "what that node failed with"),
    "step": ("e.step", "step that trained it, version that was evaluated, or step being filled at its end"),
    "lag": (
        "CASE WHEN s.ages AND e.kind IN ('trained', 'evaluated', 'dropped') "
        "THEN e.step - COALESCE(f.oldest, NULLIF(i.version, -1)) END",
        "staleness: step less oldest",
    ),
    "in_flight_lag": (
        "CASE WHEN s.ages THEN f.newest - f.oldest END",
        "the part of it that arose while it was generated",
    ),
    "in_queue_lag": (
        "CASE WHEN s.ages AND e.kind IN ('trained', 'evaluated', 'dropped') THEN e.step - f.newest END",
        "the part of it that arose while it waited",
    ),
}
"""Columns of the view `samples` -> (SQL, what it says)."""

VIEW = f"""
CREATE VIEW samples AS SELECT
    {", ".join(f'{sql} AS "{name}"' for name, (sql, _) in COLUMNS.items())}
FROM issued AS i JOIN streams AS s ON s.id = i.stream
{_joined("finished", "f")}
{_joined("accepted", "a")}
{_joined("ends", "e")}
LEFT JOIN computed AS c ON c.node = s.judge AND c.key = i.sample AND {survives("c")}
LEFT JOIN nodes AS n ON n.id = e.node
WHERE {survives("i")};
"""


# -------------------- Opens a ledger for reading, also while its run goes on.


def open_ledger(path: Path) -> sqlite3.Connection:
    """A connection that cannot write.

    A ledger that nobody has open has no log beside it, and can be read where nothing can be written.

    Raises:
        ConfigError: when there is no ledger, or none that this version reads.
    """
    if not path.is_file():
        raise ConfigError(f"there is no ledger {path}; it is part of the directory that `hflow run` makes")
    is_still = not path.with_name(f"{path.name}-wal").exists()
    database = sqlite3.connect(f"file:{quote(str(path))}?mode=ro{'&immutable=1' * is_still}", uri=True)
    try:
        (found,) = database.execute("SELECT value FROM about WHERE key = 'format'").fetchone()
    except sqlite3.DatabaseError as error:
        database.close()
        raise ConfigError(f"{path} is no ledger of hflow: {error}") from error
    if found != FORMAT:
        database.close()
        raise ConfigError(f"{path} has format {found}; this version of hflow reads {FORMAT}")
    return database
