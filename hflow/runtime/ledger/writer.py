"""`Writer`: the ledger's own thread, which turns records into rows and writes them in transactions.

One statement inserts hundreds of rows. Python's interpreter lock is released once per statement, and a busy
controller returns it late, so a statement per row would be too slow to keep up.

Invariant: records are written in the order in which they were put, and none is lost unless `RunError` is
raised or the process is killed.
"""

from __future__ import annotations

import errno
import sqlite3
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from hflow.base.durable_files import file_fix
from hflow.base.errors import RunError
from hflow.runtime.ledger.rows import Record, RowBuilder
from hflow.runtime.ledger.schema import NUM_COLUMNS

INTERVAL = 0.15
"""Seconds between transactions, unless `MAX_TRANSACTION` records wait."""
MAX_TRANSACTION = 4096
"""Records of one transaction."""
MAX_WAITING = 200_000
"""Records that may wait. A run that makes more waits for the disk."""
BULK_SIZES = (256, 16, 1)
"""Rows that one statement inserts. Each size is a statement of its own, which is prepared once."""


class Writer:
    """Writes records to a database until it is closed.

    `put` may be called from one thread only. A record is in the file about `INTERVAL` seconds later, and at
    the latest when `close` returns. Nor may another thread use the database, which has the tables, before
    that.
    """

    def __init__(self, database: sqlite3.Connection, rows: RowBuilder, path: Path) -> None:
        self._database = database
        self._rows = rows
        self._path = path
        self._waiting: deque[tuple[float, Record]] = deque()
        self._wake = threading.Event()
        self._num_put = 0
        self._num_written = 0
        self._closing = False
        self._error: sqlite3.Error | None = None
        self._start = time.time()
        self._thread = threading.Thread(target=self._run, name="hflow-ledger", daemon=True)

    def start(self, run_start: float) -> None:
        """Start the thread. Times are relative to `run_start`, in seconds since the epoch."""
        self._start = run_start
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record with the present time.

        Raises:
            RunError: when the file cannot be written.
        """
        self._num_put += 1
        self._waiting.append((time.time(), record))
        num_waiting = len(self._waiting)
        if num_waiting >= MAX_TRANSACTION or self._error is not None:
            self._write_soon_or_wait(num_waiting)

    def write_soon(self) -> None:
        """Let the thread write what waits now, without waiting for it."""
        self._wake.set()

    def flush(self) -> None:
        """Wait until everything that was put is in the file.

        Raises:
            RunError: when the file cannot be written.
        """
        while self._num_written < self._num_put and self._error is None:
            self._wake.set()
            time.sleep(0.001)
        self._check()

    def position(self) -> int:
        """Wait until everything that was put is in the file, and return the `seq` of the last row."""
        self.flush()
        return self._rows.seq

    def close(self) -> None:
        """Write what waits and end the thread. May be called twice.

        Raises:
            RunError: when the file cannot be written.
        """
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._check()

    def _write_soon_or_wait(self, num_waiting: int) -> None:
        self._wake.set()
        while num_waiting >= MAX_WAITING and self._error is None:
            time.sleep(0.001)
            num_waiting = len(self._waiting)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise write_error(self._path, self._error) from self._error

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(INTERVAL)
                self._wake.clear()
                self._write()
            self._write()
        except sqlite3.Error as error:
            self._error = error

    def _write(self) -> None:
        """Write what waits now, in transactions of at most `MAX_TRANSACTION` records."""
        while self._waiting:
            num_records = min(len(self._waiting), MAX_TRANSACTION)
            for _ in range(num_records):
                moment, record = self._waiting.popleft()
                self._rows.add(round(1e3 * (moment - self._start)), record)
            with self._database:
                for table, values in self._rows.take().items():
                    _insert(self._database, table, values)
            self._num_written += num_records


def write_error(path: Path, error: sqlite3.Error) -> RunError:
    """Return the error of a ledger that cannot be written."""
    is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    fix = file_fix(errno.ENOSPC if is_full else None)
    return RunError(f"the ledger {path} cannot be written: {error}; {fix}")


def _insert(database: sqlite3.Connection, table: str, values: list[Any]) -> None:
    """Insert rows, given as one flat list of values."""
    num_columns, first = NUM_COLUMNS[table], 0
    row = f"({', '.join('?' * num_columns)})"
    for num_rows in BULK_SIZES:
        num_values = num_rows * num_columns
        statement = f"INSERT INTO {table} VALUES {', '.join([row] * num_rows)}"
        while first + num_values <= len(values):
            database.execute(statement, values[first : first + num_values])
            first += num_values
