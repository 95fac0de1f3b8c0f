"""Buckets in files of a directory that all machines see. A file appears whole, or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hflow.errors import RunError
from hflow.workers.weights.buckets import Bucket, BucketRow
from hflow.workers.weights.transports.interface import Transport


class BucketFile(NamedTuple):
    """A payload in a file, and what is in it."""

    path: str
    num_bytes: int
    rows: tuple[BucketRow, ...]


class DiskTransport(Transport):
    """Writes each bucket under another name first; readers map the file.

    Args:
        directory: of the run; made with the first bucket.
        owner: what tells this process's files from those of others.
    """

    def __init__(self, directory: Path, owner: str) -> None:
        self._directory = directory
        self._owner = owner
        self._numbers = itertools.count()

    def put(self, bucket: Bucket) -> Any:
        """Write the bucket."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._owner}-{next(self._numbers)}.bin"
        fresh = path.with_suffix(".part")
        bucket.payload.tofile(fresh)
        os.replace(fresh, path)
        return BucketFile(str(path), bucket.payload.nbytes, bucket.rows)

    def take(self, handle: Any) -> Bucket:
        """Map the file.

        Raises:
            RunError: when it is not there, as where machines do not share the directory, or cut short.
        """
        assert isinstance(handle, BucketFile)
        path = Path(handle.path)
        size = path.stat().st_size if path.exists() else None
        if size != handle.num_bytes:
            found = "is not there" if size is None else f"has {size} bytes in the place of {handle.num_bytes}"
            raise RunError(f"weights were published in {path}, which {found}; all machines must share `out`")
        return Bucket(handle.rows, np.memmap(path, np.uint8, "r"))

    def free(self, handles: Iterable[Any]) -> None:
        """Remove the files; what is still mapped stays readable."""
        for handle in handles:
            Path(handle.path).unlink()
