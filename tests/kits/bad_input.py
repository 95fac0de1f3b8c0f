"""Bad input for the command line: what a case is, how it runs, and what is wrong with the result.

A case has files and arguments. `run_case` performs it in this process, with bounds on time and memory, and
`problem` says what is wrong with the result: refused input must end with one line that begins with `error: `,
with exit code 2, and with nothing written.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from hflow.cli import main

USER_ERROR = 2
HANG_SECONDS = 60
"""A case that takes longer hangs. The slowest that do not take 2 s on a quiet machine."""
MEMORY_BYTES = 3 << 30
"""Address space that a case may take beyond that of the process when it starts."""
MOST_CHARACTERS = 1500
"""Characters of an error: more is not one clear line."""


@dataclass(frozen=True)
class Sparse:
    """A file of this many bytes, which occupies no disk."""

    size: int
    start: bytes = b""


@dataclass(frozen=True)
class Copy:
    """A file or directory to copy."""

    source: Path


@dataclass(frozen=True)
class Link:
    """A symbolic link, which may be part of a loop."""

    target: str


@dataclass(frozen=True)
class Pipe:
    """A named pipe that no process writes to."""


Content = bytes | Sparse | Copy | Link | Pipe


@dataclass(frozen=True)
class Case:
    """A command with bad input."""

    kind: str
    """Such as `checkpoint`."""
    name: str
    """What is bad about it."""
    arguments: tuple[str, ...]
    """Of the command line, run in the directory of the files."""
    files: Mapping[str, Content] = field(default_factory=dict)
    """Path, relative to the working directory -> content."""
    is_refused: bool = True
    """False: a random change may leave the input valid, so that exit codes 0 and 1 are right too."""
    is_found_late: bool = False
    """True: only a run can find it, so that the run's directory exists."""
    says: str = ""
    """What the line must have in it, such as a key or file."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


@dataclass(frozen=True)
class Outcome:
    """What a case did."""

    code: int | None
    """Exit code; None if an exception passed `main`."""
    errors: str
    """What it wrote to stderr, and the traceback of an exception."""
    seconds: float
    written: tuple[str, ...]
    """Files and directories that it left, except caches of Python."""


class Hang(BaseException):
    """A case took longer than `HANG_SECONDS`."""


def run_case(case: Case, directory: Path) -> Outcome:
    """Write the files of a case into a new directory, run it there, and delete the directory."""
    directory.mkdir(parents=True)
    for name, content in case.files.items():
        write(directory / name, content)
    before = _paths(directory)
    out, errors = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with (
        contextlib.chdir(directory),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        _arguments(case.arguments),
        _bounds(),
    ):
        code = _exit_code(errors)
    seconds = time.monotonic() - start
    written = tuple(sorted(_paths(directory) - before))
    shutil.rmtree(directory)
    return Outcome(code, errors.getvalue(), seconds, written)


def write(path: Path, content: Content) -> None:
    """Write a file of a case, and the directories around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    match content:
        case bytes():
            path.write_bytes(content)
        case Sparse(size, start):
            path.write_bytes(start)
            os.truncate(path, size)
        case Link(target):
            path.symlink_to(target)
        case Pipe():
            os.mkfifo(path)
        case Copy(source) if source.is_dir():
            shutil.copytree(source, path, dirs_exist_ok=True)
        case Copy(source):
            shutil.copyfile(source, path)


def problem(case: Case, outcome: Outcome) -> str | None:
    """Return what is wrong with an outcome, in a line; None: nothing."""
    lines = [line for line in outcome.errors.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if "Traceback" in outcome.errors or outcome.code is None:
        return f"traceback: {last[:300]}"
    if outcome.code in (0, 1) and not case.is_refused:
        return None
    if outcome.code != USER_ERROR:
        return f"exit code {outcome.code}: {last[:300]}"
    errors = [line for line in lines if line.startswith("error: ")]
    if len(errors) != 1 or errors[0] != last:
        return f"not one line: {outcome.errors[:300]!r}"
    if len(last) > MOST_CHARACTERS:
        return f"{len(last)} characters: {last[:300]}"
    if last.endswith(":"):
        return f"says nothing: {last}"
    if case.says not in last:
        return f"does not name {case.says!r}: {last[:300]}"
    left = [] if case.is_found_late else outcome.written
    return f"left {', '.join(left)}" if left else None


def _exit_code(errors: io.StringIO) -> int | None:
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # noqa: BLE001 - what a user would see as a traceback
        traceback.print_exc(file=errors)
        return None
    return 0


@contextlib.contextmanager
def _arguments(arguments: tuple[str, ...]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["hflow", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _bounds() -> Iterator[None]:
    """Raise `Hang` or MemoryError in a case that takes too long or too much."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang(f"{HANG_SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(HANG_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _paths(directory: Path) -> set[str]:
    found = (str(path.relative_to(directory)) for path in directory.rglob("*"))
    return {path for path in found if "__pycache__" not in path}
