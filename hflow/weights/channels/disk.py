"""Buckets in files of a directory that all machines share. A file appears complete or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hflow.errors import RunError
from hflow.weights.buckets import Bucket, BucketEntry
from hflow.weights.channels.interface import ChannelSettings, WeightChannel


class BucketFile(NamedTuple):
    """A payload in a file, with its entries."""

    path: str
    num_bytes: int
    entries: tuple[BucketEntry, ...]


class DiskChannel(WeightChannel):
    """Writes each bucket to a temporary name and then renames it; readers map the file.

    The directory is created with the first bucket.
    """

    def __init__(self, settings: ChannelSettings) -> None:
        super().__init__(settings)
        self._directory = Path(settings.directory)
        self._owner = settings.owner
        self._numbers = itertools.count()

    def send(self, bucket: Bucket) -> Any:
        """Write the bucket."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{self._owner}-{next(self._numbers)}.bin"
        temporary = path.with_suffix(".part")
        bucket.payload.tofile(temporary)
        os.replace(temporary, path)
        return BucketFile(str(path), bucket.payload.nbytes, bucket.entries)

    def receive(self, handle: Any) -> Bucket:
        """Map the file.

        Raises:
            RunError: when the file is missing, for example because machines do not share the directory, or is
                incomplete.
        """
        assert isinstance(handle, BucketFile)
        path = Path(handle.path)
        size = path.stat().st_size if path.exists() else None
        if size != handle.num_bytes:
            problem = "is missing" if size is None else f"has {size} bytes instead of {handle.num_bytes}"
            raise RunError(
                f"the weights file {path} {problem}; set out= to a directory that all machines share"
            )
        return Bucket(handle.entries, np.memmap(path, np.uint8, "r"))

    def free(self, handles: Iterable[Any]) -> None:
        """Remove the files; a file that is still mapped stays readable."""
        for handle in handles:
            Path(handle.path).unlink()


Channel = DiskChannel
