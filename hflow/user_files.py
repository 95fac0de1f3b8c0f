"""The files that a user names, which may be a pipe, a device, or a loop of links."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_at_most(file: Path, num_bytes: int) -> bytes:
    """Return the content of a file, up to so many bytes.

    Raises:
        OSError: for a file that cannot be read, or a pipe or device.
    """
    # A pipe without a writer would block open() otherwise.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise OSError(None, "it is a pipe or a device, and no file")
        return opened.read(num_bytes)


def resolved(path: str | Path) -> Path:
    """Return a path without links. One in a loop of links stays, and cannot be opened.

    `Path.resolve` raises RuntimeError there before Python 3.13.
    """
    return Path(os.path.realpath(path))
