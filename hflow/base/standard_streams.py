"""The standard streams of a process whose terminal or reader may go away.

This module imports only what is small, as the processes of bodies import it.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, BinaryIO, cast

_NAMES = ("stdin", "stdout", "stderr")


def open_closed_streams() -> None:
    """Open `/dev/null` in place of a standard stream that is closed, as `>&-` of a shell leaves it.

    Otherwise the next file that is opened becomes the standard output: of libraries, and of other processes.
    """
    for descriptor, name in enumerate(_NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115


def outlive_reader(*names: str) -> None:
    """Let this process continue when nothing takes its output any more; what it writes then is dropped.

    This happens when the reader of a pipe has ended (`| head`), the terminal is closed or the disk is full. A
    stream that was replaced, as by a test, is left as it is.
    """
    for name in names:
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # `python -u` has no buffer between them
        if type(stream) is io.TextIOWrapper and type(raw) is io.FileIO:
            stream.flush()
            file = _LastingFile(raw.fileno(), "w", closefd=False)
            lasting = io.TextIOWrapper(
                cast("BinaryIO", file) if buffer is raw else io.BufferedWriter(file),
                stream.encoding,
                stream.errors,
                newline="\n",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, lasting)


class _LastingFile(io.FileIO):
    """A file whose descriptor becomes that of `/dev/null` at the first write that fails."""

    def write(self, data: Any) -> int:
        """Write, or drop, bytes."""
        try:
            written: int = super().write(data)
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes
        return written
