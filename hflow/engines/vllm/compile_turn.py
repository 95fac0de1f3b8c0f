"""The order in which equal engines on a machine compile.

vLLM keeps what it has compiled in a cache on disk. Engines that start together find nothing in it, and all of
them would compile the same. Here the first one compiles alone, and the others build when it is done.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from logging import Logger
from pathlib import Path


@contextmanager
def compile_turn(key: str, directory: Path, log: Logger) -> Iterator[None]:
    """Build an engine inside: alone if it is the first of those with its key, else after the first.

    A process that ends, however it does, ends its turn. An engine that starts later does not wait. The key is
    equal for engines that compile the same. The locks are in `directory`, on a disk of this machine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{key}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting until an equal engine on this machine has compiled")
            fcntl.flock(lock, fcntl.LOCK_SH)
            fcntl.flock(lock, fcntl.LOCK_UN)
            log.info("an equal engine has compiled; building with its cache")
        yield
