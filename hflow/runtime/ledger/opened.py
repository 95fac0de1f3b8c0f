"""Opens a ledger for reading, also while its run goes on."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

from hflow.errors import ConfigError
from hflow.runtime.ledger.schema import FORMAT


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
