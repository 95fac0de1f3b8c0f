"""The ledger's own thread: it turns notes into rows and writes them, one transaction at a time.

A statement inserts hundreds of rows. Python's interpreter lock is given up once a statement, and a busy
controller gives it back late: with a statement a row the writer could not keep up with it.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from hflow.errors import RunError
from hflow.runtime.ledger.rows import Note, Rows
from hflow.runtime.ledger.schema import APPENDED

INTERVAL = 0.15
"""Seconds between transactions, unless so many notes wait."""
MANY = 4096
BOUND = 200_000
"""Notes that wait at most; a run that makes more waits for the disk."""
BULKS = (256, 16, 1)
"""Rows that one statement inserts; each size is a statement of its own, which is prepared once."""


class Writer:
    """Writes notes to a database until it is closed.

    `put` may be called from one thread. What it took is in the file after `INTERVAL` seconds or so, or
    when `close` returns.

    Args:
        database: where the tables are; no other thread uses it until `close` has returned.
        rows: makes the rows.
        path: of the file, for messages.
    """

    def __init__(self, database: sqlite3.Connection, rows: Rows, path: Path) -> None:
        self._database = database
        self._rows = rows
        self._path = path
        self._notes: deque[tuple[float, Note]] = deque()
        self._wake = threading.Event()
        self._num_put = 0
        self._num_written = 0
        self._closing = False
        self._failure: sqlite3.Error | None = None
        self._start = time.time()
        self._thread = threading.Thread(target=self._work, name="hflow-ledger", daemon=True)

    def start(self, run_start: float) -> None:
        """Begin; times are counted from `run_start`, in seconds since the epoch."""
        self._start = run_start
        self._thread.start()

    def put(self, note: Note) -> None:
        """Take a note of now.

        Raises:
            RunError: when the file cannot be written.
        """
        self._num_put += 1
        self._notes.append((time.time(), note))
        waiting = len(self._notes)
        if waiting >= MANY or self._failure is not None:
            self._press(waiting)

    def nudge(self) -> None:
        """Write what there is now, without being waited for."""
        self._wake.set()

    def flush(self) -> None:
        """Wait until all that was put is in the file.

        Raises:
            RunError: when the file cannot be written.
        """
        while self._num_written < self._num_put and self._failure is None:
            self._wake.set()
            time.sleep(0.001)
        self._check()

    def close(self) -> None:
        """Write what is left and end the thread. Safe to call twice.

        Raises:
            RunError: when the file cannot be written.
        """
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._check()

    def _press(self, waiting: int) -> None:
        self._wake.set()
        while waiting >= BOUND and self._failure is None:
            time.sleep(0.001)
            waiting = len(self._notes)
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise unwritable(self._path, self._failure) from self._failure

    def _work(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(INTERVAL)
                self._wake.clear()
                self._write()
            self._write()
        except sqlite3.Error as error:
            self._failure = error

    def _write(self) -> None:
        """Write the notes that wait now, a transaction for every `MANY` or so."""
        while self._notes:
            num_notes = min(len(self._notes), MANY)
            for _ in range(num_notes):
                moment, note = self._notes.popleft()
                self._rows.add(round(1e3 * (moment - self._start)), note)
            with self._database:
                for table, values in self._rows.take().items():
                    _insert(self._database, table, values)
            self._num_written += num_notes


def unwritable(path: Path, error: sqlite3.Error) -> RunError:
    """The error of a ledger that cannot be written."""
    return RunError(f"the ledger {path} cannot be written: {error}")


def _insert(database: sqlite3.Connection, table: str, values: list[Any]) -> None:
    """Append rows, given as one flat list."""
    width, first = APPENDED[table], 0
    row = f"({', '.join('?' * width)})"
    for bulk in BULKS:
        size = bulk * width
        statement = f"INSERT INTO {table} VALUES {', '.join([row] * bulk)}"
        while first + size <= len(values):
            database.execute(statement, values[first : first + size])
            first += size
