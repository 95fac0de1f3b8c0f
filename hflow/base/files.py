"""The files that a user names, which may be a pipe, a device, or a loop of links.

Files that must survive the end of the machine's power, or of its disk: syncing, checksums, and errors.

Reads JSON that others wrote: strictly, and with bounds.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hflow.base.errors import ConfigError, RunError, shorten


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
    new = path.with_name(f".{path.name}")
    try:
        new.write_text(text, encoding="utf-8")
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

    Args:
        directory: the directory that was written, or a file.
        error: raised by Python, safetensors or tokenizers. None is returned for one of another kind.
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


MAX_FILE_BYTES = 256 << 20
"""The largest JSON file that is read. The plan of a large cluster has tens of MB."""
_MAX_DEPTH = 100
LONG_NUMBER = f"a whole number of more than {sys.get_int_max_str_digits():,} digits"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document.

    Bytes must be UTF-8. Unlike `json.loads`, it refuses objects that have a key twice, NaN, Infinity, and
    numbers that are larger than the largest float.

    Raises:
        ValueError: for anything else, with the reason.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if is_of_long_number(error):
            raise ValueError(f"it has {LONG_NUMBER}") from None
        raise


def is_of_long_number(error: BaseException) -> bool:
    """Return whether Python refuses to read text as a number because of its length, which costs time."""
    return "integer string conversion" in str(error)


def read_json(file: Path, what: str = "JSON file") -> Any:
    """Return the value in a JSON file.

    Args:
        file: the file's path.
        what: what the file should be, for messages.

    Raises:
        ConfigError: for a file that cannot be read, is too large, or is not JSON; one line that names it.
    """
    try:
        content = read_at_most(file, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {str(file)!r}: {error.strerror or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is not a {what}: it has more than {MAX_FILE_BYTES:,} bytes")
    try:
        return parse_json(content)
    except ValueError as error:
        raise ConfigError(f"{file} is not a {what}: invalid JSON: {error}") from error


def read_json_object(file: Path, what: str = "JSON file") -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ConfigError: for the reasons of `read_json`, and for another value than an object.
    """
    value = read_json(file, what)
    if not isinstance(value, dict):
        raise ConfigError(f"{file} is not a {what}: it must be a JSON object, but it is {value!r:.40}")
    return value


def find_json_problem(value: Any) -> str | None:
    """Return the reason why a Python value is not JSON, as in `has NaN, ...`; None if it is."""
    values = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in values:
            if isinstance(item, str):
                if not item.isascii() and _LONE_SURROGATE.search(item):
                    return "has half of a surrogate pair, which is no text"
            elif isinstance(item, float):
                if math.isnan(item):
                    return "has NaN, which is no JSON value (libraries write it where a value is missing)"
                if math.isinf(item):
                    return f"has {item}, which is no JSON value"
            elif isinstance(item, list | tuple):
                inner += item
            elif isinstance(item, Mapping):
                inner += item
                inner += item.values()
            elif item is not None and not isinstance(item, int):
                return f"has a value of type {type(item).__name__}, which JSON does not have"
        values = inner
        if not values:
            return None
    return f"is nested more than {_MAX_DEPTH} levels deep"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated!r} is there twice")
    return values


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shorten(text, 40)} is larger than the largest float")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
