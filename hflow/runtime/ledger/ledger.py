"""`Ledger`: what the executor tells of each sample, from its admission to its one end.

It sits beside the loop that runs everything, so a note costs that loop an append; the rest is done by
the writer's thread. In the file is what was noted up to some 0.15 s ago: when the process is killed, no
more than that is lost, and the file stays whole. A run that fails or is interrupted loses nothing, as
`close` writes what is left. Against a machine that loses power the file is whole, but not up to date:
transactions are not forced to the disk one by one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from hflow.errors import RunError
from hflow.runtime.events import Accept, FormBatch, Instruction, OpenGroup, Refuse, StepDone
from hflow.runtime.ledger.header import Header
from hflow.runtime.ledger.rows import Closing, Commit, Issued, Rewind, Rows
from hflow.runtime.ledger.schema import APPENDED, FORMAT, TABLES, VIEW, survives
from hflow.runtime.ledger.writer import Writer, unwritable
from hflow.workers.interface import ComputeReady, NodeResult, SampleReady

KEPT = (Accept, Refuse, FormBatch, StepDone)
"""Instructions that say what became of samples."""


class Ledger:
    """The ledger of one run, open for appending. Leaving it as a context manager closes it.

    Args:
        path: of the file; one that exists is continued.
        header: streams and nodes of the run.

    Raises:
        RunError: when the file cannot be written; so do all methods.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        try:
            self._database = sqlite3.connect(path, check_same_thread=False)
            start, seq = _prepare(self._database, header)
        except sqlite3.Error as error:
            raise unwritable(path, error) from error
        self._writer = Writer(self._database, Rows(header, seq), path)
        self._writer.start(start)
        self._is_open = True
        self._counts: dict[str, int] = {}

    # ------------------------------------------------------------------------------ notes
    def record_issued(self, what: OpenGroup, row: int, worker: int, version: int) -> None:
        """A group goes to a worker whose engine holds weights of `version` (-1: no engine)."""
        self._writer.put(Issued(what, row, worker, version))

    def record_weights(self, replica: str, version: int, digest: str) -> None:
        """All ranks of a generation replica hold a version of the weights, with this digest."""
        self._writer.put(Commit(replica, version, digest))

    def record_result(self, event: SampleReady | ComputeReady | NodeResult) -> None:
        """A source, a node of samples or groups, or a batch node on one worker, is done."""
        if not isinstance(event, NodeResult) or event.numbers:
            self._writer.put(event)

    def record_instruction(self, instruction: Instruction) -> None:
        """The state machine decided; instructions that tell nothing of samples are passed over."""
        if isinstance(instruction, KEPT):
            self._writer.put(instruction)
            if isinstance(instruction, StepDone):
                self._writer.nudge()

    def flush(self) -> None:
        """Wait until all that was noted is in the file."""
        self._writer.flush()

    # ------------------------------------------------------------------------------- ends
    def close(self, reason: str) -> dict[str, int]:
        """End it: whatever has no end is unused, for this reason. Returns the samples by end."""
        if self._is_open:
            self._is_open = False
            try:
                self._counts = self._finish(reason)
            except sqlite3.Error as error:
                raise unwritable(self._path, error) from error
            finally:
                self._database.close()
        return self._counts

    def _finish(self, reason: str) -> dict[str, int]:
        try:
            self._writer.put(Closing(reason))
        finally:
            self._writer.close()
        with self._database:
            self._database.execute(_UNUSED, {"reason": reason})
        return count_ends(self._database)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("done" if kind is None else "failed" if issubclass(kind, Exception) else "interrupted")


def rewind(path: Path, step: int) -> None:
    """Take a ledger that is not open back to `step` completed steps, as a run does that goes on from there.

    Samples that were admitted before keep their rows, and may yet have an end; what came later is no
    part of the run's history any more, and its ids may be issued again.

    Raises:
        RunError: when no history of the file has completed so many steps.
    """
    database = sqlite3.connect(path)
    try:
        position = 0
        if step:
            where = f"step = ? AND {survives('steps')}"
            (found,) = database.execute(f"SELECT MAX(seq) FROM steps WHERE {where}", (step - 1,)).fetchone()
            if found is None:
                raise RunError(f"{path} never completed {step} steps, so it cannot go on from there")
            position = found
        rows = Rows(Header((), (), None), _last_seq(database))
        now = round(1e3 * (time.time() - _started_at(database)))
        rows.add(now, Rewind(step, position))
        with database:
            database.execute("INSERT INTO rewinds VALUES (?, ?, ?, ?)", rows.take()["rewinds"])
    finally:
        database.close()


def count_ends(database: sqlite3.Connection) -> dict[str, int]:
    """Samples by end, in the surviving history."""
    return dict(
        database.execute(
            f"SELECT kind, COUNT(*) FROM ends AS e WHERE {survives('e')} GROUP BY kind ORDER BY kind"
        )
    )


_UNUSED = f"""
INSERT INTO ends
SELECT i.stream, i.sample, c.seq, c.time, 'unused',
    (SELECT COUNT(*) FROM batches AS b JOIN streams ON streams.id = b.stream
     WHERE is_trained AND {survives("b")}),
    :reason, NULL,
    CASE WHEN a.seq IS NOT NULL THEN 'it was accepted, and waited for its batch'
         WHEN f.seq IS NOT NULL THEN 'its group was not complete'
         ELSE 'it was not finished' END
FROM issued AS i
JOIN (SELECT MAX(seq) AS seq, time FROM closings) AS c
LEFT JOIN finished AS f ON f.stream = i.stream AND f.sample = i.sample AND {survives("f")}
LEFT JOIN accepted AS a ON a.stream = i.stream AND a.sample = i.sample AND {survives("a")}
WHERE {survives("i")} AND NOT EXISTS (
    SELECT 1 FROM ends AS e WHERE e.stream = i.stream AND e.sample = i.sample AND {survives("e")})
"""


def _prepare(database: sqlite3.Connection, header: Header) -> tuple[float, int]:
    """Make the tables where there are none; returns when the run started, and the last `seq`."""
    database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone():
        _create(database, header)
    return _started_at(database), _last_seq(database)


def _create(database: sqlite3.Connection, header: Header) -> None:
    nodes = {node.name: number for number, node in enumerate(header.nodes)}
    streams = {stream.name: number for number, stream in enumerate(header.streams)}
    about = {"format": FORMAT, "started_at": time.time(), "max_lag": header.max_lag}
    with database:
        database.executescript(TABLES + VIEW)
        database.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        _numbered(
            database,
            "nodes",
            ((n.name, streams[n.stream], n.per_group, n.field, n.place) for n in header.nodes),
        )
        _numbered(
            database,
            "streams",
            (
                (s.name, s.source, s.dataset, s.group_size, s.is_trained, s.ages, s.judge and nodes[s.judge])
                for s in header.streams
            ),
        )


def _numbered(database: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    for number, row in enumerate(rows):
        database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * (len(row) + 1))})", (number, *row))


def _started_at(database: sqlite3.Connection) -> float:
    (start,) = database.execute("SELECT value FROM about WHERE key = 'started_at'").fetchone()
    return float(start)


def _last_seq(database: sqlite3.Connection) -> int:
    last = (database.execute(f"SELECT MAX(seq) FROM {table}").fetchone()[0] or 0 for table in APPENDED)
    return max(last)
