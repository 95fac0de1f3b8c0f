"""Reads files that a user names, which may be a pipe, a device, or in a loop of links, with bounds."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.json_text import parse_json

MAX_FILE_BYTES = 256 << 20
"""The largest JSON file that is read. The plan of a large cluster has tens of MB."""


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


def read_json(file: Path, what: str = "JSON file") -> Any:
    """Return the value in a JSON file; messages call it `what`.

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
