"""Fingerprints of the files that a run reads, as its `inputs.json` keeps them.

A file is known by its size and a hash of its content: of all of it where the files of an input are small,
else of blocks at equal distances. Where a file is stored does not matter, so a run may move with its files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from hflow.base.durable_files import file_fix
from hflow.base.errors import ConfigError
from hflow.base.files import resolved
from hflow.planner.diff import and_more

FORMAT = 1
INPUT_BYTES = 256 << 20
"""Bytes of the files of an input that are hashed, divided over them. Reading them takes about a quarter of a
second."""
BLOCK_BYTES = 64 << 10
MIN_BLOCKS = 3
"""Blocks that are hashed of a file, however many files an input has."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", "/config.json")
"""How the paths of a checkpoint's files end that say what its model is."""


@dataclass(frozen=True)
class FileFingerprint:
    """One file."""

    path: str
    """Absolute, without links."""
    size: int
    digest: str

    @property
    def content(self) -> tuple[int, str]:
        """What a file is known by."""
        return self.size, self.digest


@dataclass(frozen=True)
class RunInput:
    """Files that one part of the configuration names."""

    num_blocks: int
    """Blocks of each file that its hash reads. Of a file that has no more, it reads everything."""
    files: tuple[FileFingerprint, ...]
    """In the order in which they are read."""

    def by_name(self) -> dict[str, FileFingerprint]:
        """Return the files by their paths below the directory that all of them are in."""
        if not self.files:
            return {}
        root = os.path.commonpath([os.path.dirname(file.path) for file in self.files])
        return {os.path.relpath(file.path, root): file for file in self.files}


@dataclass(frozen=True)
class RunInputs:
    """The files that a run reads."""

    format: int
    inputs: Mapping[str, RunInput]
    """Key of the configuration, such as `data.train` or `models.ref` -> its files."""

    def to_json(self) -> str:
        """Return the content of `inputs.json`."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_inputs(file: Path) -> RunInputs | None:
    """Return the inputs of a run; None if an earlier version of hflow wrote none.

    Raises:
        ConfigError: if the file is damaged, or a later version wrote it.
    """
    if not file.is_file():
        return None
    try:
        known = _ADAPTER.validate_json(file.read_bytes(), strict=True)
        problem = "" if known.format == FORMAT else f"format: {known.format}, not {FORMAT}"
    except ValidationError as error:
        first = error.errors()[0]
        problem = ": ".join([".".join(map(str, first["loc"])), first["msg"]])
    if problem:
        raise ConfigError(
            f"{file} does not fit this version of hflow: {problem}. Use the version that wrote it, or remove "
            "the file to continue without comparing the files that the run reads."
        )
    return known


def describe_change(before: RunInput, after: RunInput) -> str | None:
    """Return the first difference of the files of an input; None if their contents are equal, in order."""
    if [file.content for file in before.files] == [file.content for file in after.files]:
        return None
    old, new = before.by_name(), after.by_name()
    changes = [f"{file.path} is gone" for name, file in old.items() if name not in new]
    changes += [f"{file.path} is new" for name, file in new.items() if name not in old]
    for name, file in new.items():
        if name in old and old[name].content != file.content:
            sizes = old[name].size, file.size
            changed = "" if sizes[0] == sizes[1] else f" ({sizes[0]:,} -> {sizes[1]:,} bytes)"
            changes.append(f"{file.path} has other content{changed}")
    first, *others = changes or ["its files are read in another order"]
    return first + and_more(len(others))


def fingerprint(files: Iterable[Path], num_blocks: int | None = None) -> RunInput:
    """Return the fingerprints of files, read in this order, by `num_blocks` of each.

    Without a number, `INPUT_BYTES` decides it.

    Raises:
        ConfigError: for a file that cannot be read.
    """
    files = list(files)
    if num_blocks is None:
        num_blocks = max(MIN_BLOCKS, INPUT_BYTES // BLOCK_BYTES // max(1, len(files)))
    return RunInput(num_blocks, tuple(_fingerprint(resolved(file), num_blocks) for file in files))


def _fingerprint(path: Path, num_blocks: int) -> FileFingerprint:
    try:
        stat = path.stat()
        return _hashed(path, num_blocks, stat.st_size, stat.st_mtime_ns)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or error}; {file_fix(error.errno)}"
        ) from error


@cache
def _hashed(path: Path, num_blocks: int, size: int, modified: int) -> FileFingerprint:
    """Hash a file. Models that start from one checkpoint have the same files."""
    digest = hashlib.blake2b(digest_size=16)
    last = max(0, size - BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        if size <= num_blocks * BLOCK_BYTES:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
        else:
            for number in range(num_blocks):
                file.seek(last * number // (num_blocks - 1))
                digest.update(file.read(BLOCK_BYTES))
    return FileFingerprint(str(path), size, digest.hexdigest())


_ADAPTER = TypeAdapter(RunInputs)
