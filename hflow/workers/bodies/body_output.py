"""What bodies print and log, line by line, with the sample, group or step that they are called for.

`body_call` marks the calls of bodies. While a `BodyOutput` is open in a process, what these calls write to
`sys.stdout` and `sys.stderr` becomes `BodyLine`s; all else is written as before. A `BodyPipe` takes the lines
of child processes to the process that started them, also the last ones before a child is killed.

This module must import neither torch nor ray: it is used in child processes, which stay small.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.connection import Connection
from typing import Any, TextIO, cast

from hflow.base.secrets import mask_secrets
from hflow.processes.forkserver import CleanContext
from hflow.types.body_line import BodyLine

LineSink = Callable[[Sequence[BodyLine]], None]
"""Takes lines, from any thread."""

PIECE_LENGTH = 800
"""Characters of one message of a pipe. The system keeps messages of up to 4,096 bytes whole."""

_STREAMS = ("stdout", "stderr")


class _Call:
    """A call of a body, and the line that it has begun."""

    def __init__(self, node: str, key: int) -> None:
        self._node = node
        self._key = key
        self._begun = ""

    def write(self, text: str, sink: LineSink) -> None:
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            sink([self._line(line) for line in lines])

    def end(self, problem: str, sink: LineSink) -> None:
        if self._begun:
            self.write("\n", sink)
        if problem:
            sink([self._line(line, is_traceback=True) for line in problem.splitlines()])

    def _line(self, text: str, *, is_traceback: bool = False) -> BodyLine:
        return BodyLine(self._node, self._key, time.time(), mask_secrets(text), is_traceback)


_call: ContextVar[_Call | None] = ContextVar("body_call", default=None)
"""The call of a body that this thread or task is in."""
_open: list[BodyOutput] = []
"""The outputs that are open in this process; the last one takes the lines."""


@contextmanager
def body_call(body: Callable[..., Any], node: str, key: int) -> Iterator[None]:
    """Mark the call of a body: what is printed in this block, and in tasks that it starts, belongs to it.

    If the block raises, the traceback is added to what was printed, from the body on.

    `key` is the sample or group that the body is called for; of a batch node, the step.
    """
    call = _Call(node, key)
    token = _call.set(call)
    problem = ""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, BdbQuit | asyncio.CancelledError):
            problem = _traceback(error, body)
        raise
    finally:
        _call.reset(token)
        if _open:
            call.end(problem, _open[-1].sink)


def _traceback(error: BaseException, body: Callable[..., Any]) -> str:
    """Return the traceback of an error from the body on; the whole one if the body is not in it."""
    code, first = getattr(inspect.unwrap(body), "__code__", None), error.__traceback__
    while first is not None and first.tb_frame.f_code is not code:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))


class BodyOutput:
    """Takes what bodies in this process write to the standard streams, until it is closed.

    `is_echoed` writes everything to the streams as well, at once, as a debugger's terminal needs it.
    """

    def __init__(self, sink: LineSink, is_echoed: bool = False) -> None:
        self.sink = sink
        self._streams: dict[str, tuple[TextIO, TextIO]] = {}
        """Name -> the stream before, and the one in its place."""
        for name in _STREAMS:
            before: TextIO = getattr(sys, name)
            stream = cast("TextIO", _BodyStream(before, sink, is_echoed))
            self._streams[name] = before, stream
            _replace_stream(name, before, stream)
        _open.append(self)

    def close(self) -> None:
        """Restore the streams; safe to call twice."""
        if self in _open:
            _open.remove(self)
            for name, (before, stream) in self._streams.items():
                if getattr(sys, name) is stream:
                    _replace_stream(name, stream, before)


def _replace_stream(name: str, old: TextIO, new: TextIO) -> None:
    """Replace a standard stream, also in the log handlers that write to it."""
    setattr(sys, name, new)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


def log_levels() -> dict[str, int]:
    """Return the levels of this process's loggers by name, as `copy_log_levels` takes them.

    Returns:
        The root logger's is named "". Empty if nothing here has configured logging, as `logging.basicConfig`.
    """
    if not logging.root.handlers:
        return {}
    loggers = {"": logging.root, **logging.root.manager.loggerDict}
    levels = {name: getattr(logger, "level", logging.NOTSET) for name, logger in loggers.items()}
    return {name: level for name, level in levels.items() if level}


def copy_log_levels(levels: Mapping[str, int]) -> None:
    """Let loggers write here what another process logs; a recipe may configure them in its file."""
    if levels:
        logging.basicConfig()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


class _BodyStream:
    """A standard stream that gives what bodies write to a sink."""

    def __init__(self, stream: TextIO | None, sink: LineSink, is_echoed: bool) -> None:
        self._stream = stream
        self._sink = sink
        self._is_echoed = is_echoed

    def write(self, text: str) -> int:
        call = _call.get()
        if call is not None:
            call.write(text, self._sink)
        if self._stream is not None and (call is None or self._is_echoed):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what the stream still has; a process whose stream is closed has none."""
        if self._stream is not None:
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class BodyPipe:
    """A pipe through which child processes send lines to a sink, called on a thread of it or in `drain`.

    Attributes:
        writer: the end of the children, to be passed to them as they start.
    """

    def __init__(self, sink: LineSink) -> None:
        self._reader: Connection[Any, Any]
        self.writer: Connection[Any, Any]
        self._reader, self.writer = CleanContext().Pipe(duplex=False)
        self._sink = sink
        self._begun: dict[tuple[str, int], str] = {}
        """Node and key -> the pieces of a line that has not ended."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="body-output", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Pass on all lines that have been sent."""
        with self._lock:
            while not self._is_closed and self._reader.poll():
                self._take(self._reader.recv_bytes())

    def close(self) -> None:
        """Pass on all lines that have been sent, and close the pipe; safe to call twice."""
        if not self._is_closed:
            self.writer.send_bytes(b"")
            self._thread.join()
            self._reader.close()
            self.writer.close()

    def _serve(self) -> None:
        while not self._is_closed:
            self._reader.poll(None)
            self.drain()

    def _take(self, message: bytes) -> None:
        if not message:
            self._is_closed = True
            return
        line: BodyLine
        line, is_end = pickle.loads(message)
        text = self._begun.pop((line.node, line.key), "") + line.text
        if is_end:
            self._sink([BodyLine(line.node, line.key, line.time, text, line.is_traceback)])
        else:
            self._begun[line.node, line.key] = text


def send_lines(writer: Connection[Any, Any], lines: Sequence[BodyLine]) -> None:
    """Send lines through a `BodyPipe`, from a child process."""
    for line in lines:
        starts = range(0, len(line.text) or 1, PIECE_LENGTH)
        for start in starts:
            text = line.text[start : start + PIECE_LENGTH]
            piece = BodyLine(line.node, line.key, line.time, text, line.is_traceback)
            writer.send_bytes(pickle.dumps((piece, start == starts[-1]), pickle.HIGHEST_PROTOCOL))
