"""`Ledger` records what happens to each sample, from its admission to its end.

Recording costs the controller's loop one append; the writer's thread does the rest. The file is about 0.15 s
behind. If the process is killed, that is all that is lost, and the file is intact. A run that fails or is
interrupted loses nothing, because `close` writes what waits. If the machine loses power, the file is intact
but may lack more, because transactions are not forced to the disk one by one.

Invariant: when the ledger is closed, every sample that was issued has exactly one end.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from hflow.base.errors import RunError
from hflow.runtime.events import Accept, FormBatch, Instruction, OpenGroup, Refuse, StepDone
from hflow.runtime.ledger.header import Header
from hflow.runtime.ledger.rows import (
    GroupIssued,
    RowBuilder,
    RunClosed,
    RunRewound,
    SamplesRestarted,
    WeightsVerified,
)
from hflow.runtime.ledger.schema import FORMAT, NUM_COLUMNS, TABLES, VIEW, create_later_tables, survives
from hflow.runtime.ledger.writer import Writer, write_error
from hflow.workers.interface import ComputeReady, NodeResult, SampleReady

RECORDED = (Accept, Refuse, FormBatch, StepDone)
"""Instructions that decide about samples."""


class Ledger:
    """The ledger of one run, open for appending to a new or an existing file, until the context ends.

    Raises:
        RunError: when the file cannot be written. All methods raise it too.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        try:
            self._database = sqlite3.connect(path, check_same_thread=False)
            start, seq = _prepare(self._database, header)
        except sqlite3.Error as error:
            raise write_error(path, error) from error
        self._writer = Writer(self._database, RowBuilder(header, seq), path)
        self._writer.start(start)
        self._is_open = True
        self._counts: dict[str, int] = {}

    # Records
    def record_issued(
        self, instruction: OpenGroup, row: int, worker: int, version: int, reason: str = ""
    ) -> None:
        """Record that a group goes to a worker whose engine holds weights of `version` (-1: no engine).

        The reason is that of the sampler which chose the row.
        """
        self._writer.put(GroupIssued(instruction, row, worker, version, reason))

    def record_restarted(self, stream: str, samples: tuple[int, ...], reason: str) -> None:
        """Record that samples begin again, as the worker on which they were in flight has failed."""
        self._writer.put(SamplesRestarted(stream, samples, reason))

    def record_weights(self, replica: str, version: int, checksum: str) -> None:
        """Record that all ranks of a generation replica hold a version of the weights."""
        self._writer.put(WeightsVerified(replica, version, checksum))

    def record_result(self, result: SampleReady | ComputeReady | NodeResult) -> None:
        """Record that a source, a sample or group node, or a batch node on one worker is done."""
        if not isinstance(result, NodeResult) or result.values or result.skipped:
            self._writer.put(result)

    def record_instruction(self, instruction: Instruction) -> None:
        """Record an instruction of the state machine, if it decides about samples."""
        if isinstance(instruction, RECORDED):
            self._writer.put(instruction)
            if isinstance(instruction, StepDone):
                self._writer.write_soon()

    def flush(self) -> None:
        """Wait until all records are in the file."""
        self._writer.flush()

    def position(self) -> int:
        """Write all records, and return the `seq` of the last one."""
        return self._writer.position()

    # Ends
    def close(self, reason: str) -> dict[str, int]:
        """Close the ledger. Samples without an end are unused, for this reason.

        Return the number of samples by end.
        """
        if self._is_open:
            self._is_open = False
            try:
                self._counts = self._finish(reason)
            except sqlite3.Error as error:
                raise write_error(self._path, error) from error
            finally:
                self._database.close()
        return self._counts

    def _finish(self, reason: str) -> dict[str, int]:
        try:
            self._writer.put(RunClosed(reason))
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


def rewind(path: Path, step: int, position: int) -> None:
    """Take a closed ledger back to a checkpoint, for a run that continues from there.

    Samples that were admitted before keep their rows, and may still get an end. What came later does not
    belong to the run's history any more, and its ids may be issued again. Without a checkpoint its step and
    `Ledger.position` are 0.

    Raises:
        RunError: when the run has not completed that many steps, or the file is damaged.
    """
    database = sqlite3.connect(path)
    try:
        if not step and not database.execute("SELECT 1 FROM sqlite_master").fetchone():
            return  # the run ended before it recorded anything
        create_later_tables(database)
        where = f"step = ? AND seq <= ? AND {survives('steps')}"
        found = database.execute(f"SELECT 1 FROM steps WHERE {where}", (step - 1, position)).fetchone()
        if step and not found:
            raise RunError(
                f"the run of {path} cannot continue after step {step}, which it has not completed. "
                f"Continue from an earlier checkpoint."
            )
        rows = RowBuilder(Header((), (), None), _last_seq(database))
        now = round(1e3 * (time.time() - _started_at(database)))
        rows.add(now, RunRewound(step, position))
        with database:
            database.execute("INSERT INTO rewinds VALUES (?, ?, ?, ?)", rows.take()["rewinds"])
    except sqlite3.Error as error:
        raise RunError(f"the ledger {path} is damaged: {error}; resume from a copy of the run") from error
    finally:
        database.close()


def count_ends(database: sqlite3.Connection) -> dict[str, int]:
    """Return the number of samples by end."""
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
    CASE WHEN a.seq IS NOT NULL THEN 'it was accepted and waited for its batch'
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
    """Create the tables if there are none. Returns when the run started, and the last `seq`."""
    database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;")
    if not _is_created(database):
        _create(database, header)
    create_later_tables(database)
    return _started_at(database), _last_seq(database)


def _is_created(database: sqlite3.Connection) -> bool:
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = 'about'").fetchone() is not None


def _create(database: sqlite3.Connection, header: Header) -> None:
    nodes = {node.name: number for number, node in enumerate(header.nodes)}
    streams = {stream.name: number for number, stream in enumerate(header.streams)}
    about = {"format": FORMAT, "started_at": time.time(), "max_lag": header.max_lag}
    with database:
        database.executescript(f"BEGIN; {TABLES + VIEW}")  # all of it, or nothing, is in the file
        database.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        _insert_numbered(
            database,
            "nodes",
            ((n.name, streams[n.stream], n.per_group, n.field, n.place) for n in header.nodes),
        )
        _insert_numbered(
            database,
            "streams",
            (
                (s.name, s.source, s.dataset, s.group_size, s.is_trained, s.ages, s.judge and nodes[s.judge])
                for s in header.streams
            ),
        )


def _insert_numbered(database: sqlite3.Connection, table: str, rows: Iterable[tuple[Any, ...]]) -> None:
    for number, row in enumerate(rows):
        database.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * (len(row) + 1))})", (number, *row))


def _started_at(database: sqlite3.Connection) -> float:
    (start,) = database.execute("SELECT value FROM about WHERE key = 'started_at'").fetchone()
    return float(start)


def _last_seq(database: sqlite3.Connection) -> int:
    last = (
        database.execute(f"SELECT MAX(seq) FROM {table}").fetchone()[0] or 0
        for table in NUM_COLUMNS
        if table != "drawn"
    )
    return max(last)
