"""The directory in which each machine keeps what it makes once, such as virtual environments."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hflow.base.errors import ConfigError

CACHE_VARIABLE = "HFLOW_CACHE"


def cache_directory() -> Path:
    """Return the directory: that of `HFLOW_CACHE`, or `~/.cache/hflow`. It may not exist yet."""
    own = os.environ.get(CACHE_VARIABLE)
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hflow"


@contextmanager
def unfinished_copy(made: Path, what: str) -> Iterator[Path]:
    """Lock a directory of the cache, and yield an empty one beside it, which is removed in the end.

    Processes of one machine that make the same directory wait for the first.

    Raises:
        ConfigError: if the cache cannot be written.
    """
    from filelock import FileLock

    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(made.with_name(f".{made.name}.lock")):
            unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=made.parent))
            unfinished.chmod(0o755)
            try:
                yield unfinished
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{what}, which cannot be written to {made}: {error.strerror or error}; set {CACHE_VARIABLE} to "
            "another directory"
        ) from error
