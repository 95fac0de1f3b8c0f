"""Writes files that survive the loss of power: syncing, checksums, and errors of the disk."""

from __future__ import annotations

import errno
import os
import re
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from hflow.base.errors import RunError

FileChecksum = tuple[int, str]
"""Bytes of a file, and the CRC-32 of its content as 8 hexadecimal digits."""

WriteFiles = Callable[[], Sequence[Path]]
"""Writes files from a copy of their content, on any thread, and returns their paths."""

_READ_BYTES = 8 << 20
_FREE_SPACE = "free some space, or write to another disk"
_FIXES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: _FREE_SPACE,
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EACCES: "change its permissions, or use another directory",
    errno.EROFS: "write to another disk",
    errno.EMFILE: "raise the limit with `ulimit -n`",
}
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
    """Write a text file, so that after the end of this process it has either the old or the new content.

    Raises:
        WriteError: when it cannot be written. It then has the old content.
    """
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file as `replace_text` does."""
    new = path.with_name(f".{path.name}")
    try:
        new.write_bytes(data)
        sync(new)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise write_error(path, error) or error from error


def file_checksum(path: Path) -> FileChecksum:
    """Return the size and the checksum of a file's content."""
    crc, size = 0, 0
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            crc, size = zlib.crc32(part, crc), size + len(part)
    return size, f"{crc:08x}"


def write_error(directory: Path, error: BaseException) -> WriteError | None:
    """Return the error to raise in place of an error of the system while files were written.

    It was raised by Python, safetensors or tokenizers; None is returned for one of another kind.
    """
    number = error.errno if isinstance(error, OSError) else _library_errno(error)
    if number is None:
        return None
    return WriteError(f"{directory} cannot be written: {os.strerror(number)}; {file_fix(number)}")


def file_fix(number: int | None) -> str:
    """Return the fix for an error of the system, an `errno`, on a file."""
    return _FIXES.get(number or 0, "check the path, its permissions and its disk")


def _library_errno(error: BaseException) -> int | None:
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else None
