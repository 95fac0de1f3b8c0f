"""`BackgroundWriter`: writes files of checkpoints on a thread of its own, while the worker continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from hflow.base.durable_files import FileChecksum, WriteFiles, file_checksum, sync, write_error


class BackgroundWriter:
    """Performs one write after another.

    A write holds a copy of what it writes. So that there is at most one copy, `wait` for the last write of
    the same thing before the next copy is made.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hflow-writer")
        self._lock = threading.Lock()
        self._last: dict[str, Future[dict[str, FileChecksum]]] = {}
        """What is written -> its last write."""
        self._unfinished: dict[tuple[str, str], Future[dict[str, FileChecksum]]] = {}
        """What is written and its directory -> a write that was not waited for by `finish` yet."""

    def start(self, name: str, directory: str, write: WriteFiles) -> None:
        """Begin to write files in a directory; `name` says what is written, such as a model."""
        with self._lock:
            future = self._thread.submit(_write, Path(directory), write)
            self._last[name] = self._unfinished[name, directory] = future

    def wait(self, name: str) -> None:
        """Wait for the last write of this name, whether it succeeds or not."""
        with self._lock:
            last = self._last.pop(name, None)
        if last is not None:
            wait([last])

    def finish(self, name: str, directory: str) -> Mapping[str, FileChecksum]:
        """Wait until what was written to a directory is on disk; return the files by their path in it.

        Raises:
            RunError: when the files cannot be written.
        """
        with self._lock:
            future = self._unfinished.pop((name, directory), None)
        return {} if future is None else future.result()

    def close(self) -> None:
        """Wait for the write that has begun, and drop the others."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _write(directory: Path, write: WriteFiles) -> dict[str, FileChecksum]:
    """Write files, wait until they are on disk, and return their checksums."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = write()
        for path in paths:
            sync(path)
        for parent in {path.parent for path in paths}:
            sync(parent)
        return {str(path.relative_to(directory)): file_checksum(path) for path in paths}
    except Exception as error:
        if (explained := write_error(directory, error)) is not None:
            raise explained from None
        raise
