"""Files that must survive the end of the machine's power, or of its disk: syncing, checksums, and errors."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from hflow.errors import RunError

FileChecksum = tuple[int, str]
"""Bytes of a file, and the CRC-32 of its content as 8 hexadecimal digits."""

WriteFiles = Callable[[], Sequence[Path]]
"""Writes files from a copy of their content, on any thread, and returns their paths."""

_READ_BYTES = 8 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The disk, the user's quota, or the allowed size of a file is exhausted."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries that are written in Rust (safetensors, tokenizers) report an error of the system."""


class WriteError(RunError):
    """Files cannot be written: the disk is full, read-only or gone."""


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a text file, so that after the end of this process it has either the old or the new content."""
    new = path.with_name(f".{path.name}")
    new.write_text(text, encoding="utf-8")
    sync(new)
    new.replace(path)


def file_checksum(path: Path) -> FileChecksum:
    """Return the size and the checksum of a file's content."""
    crc, size = 0, 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            crc, size = zlib.crc32(part, crc), size + len(part)
    return size, f"{crc:08x}"


def write_error(directory: Path, error: BaseException) -> WriteError | None:
    """Return what to raise in place of an error of the system while files were written.

    Args:
        directory: that was written.
        error: raised by Python, safetensors or tokenizers. None is returned for one of another kind.
    """
    number = error.errno if isinstance(error, OSError) else _library_errno(error)
    if number is None:
        return None
    fix = (
        "free space on its disk, or set out to another disk"
        if number in _FULL
        else "make it writable, or set out to another directory"
    )
    return WriteError(f"{directory} cannot be written: {os.strerror(number)}; {fix}")


def _library_errno(error: BaseException) -> int | None:
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else None
