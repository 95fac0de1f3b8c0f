"""The command line in the process of a test: what a command prints, and how it refuses."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest

from hflow.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        code: the exit code
        output: the standard output
        errors: the standard error
    """

    code: int
    output: str
    errors: str


class CommandLine:
    """`hflow` in this process: `hflow("plan", "recipes/grpo.py")`.

    Attributes:
        ended: how the latest command ended
    """

    ended: Ended

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch = patch
        self._capture = capture

    def __call__(self, *arguments: str | os.PathLike[str]) -> Ended:
        """Run a command. An exception that is not an exit is raised."""
        self._patch.setattr(sys, "argv", ["hflow", *map(os.fspath, arguments)])
        self._capture.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        printed = self._capture.readouterr()
        assert stop.value.code is None or isinstance(stop.value.code, int)
        self.ended = Ended(stop.value.code or 0, printed.out, printed.err)
        return self.ended

    def prints(self, *arguments: str | os.PathLike[str]) -> str:
        """Return the output of a command that succeeds."""
        ended = self(*arguments)
        assert ended.code == 0, ended
        return ended.output

    def fails(self, *arguments: str | os.PathLike[str]) -> str:
        """Return the error of a command that fails with code 2: one line, which is the last."""
        ended = self(*arguments)
        assert ended.code == 2, ended
        assert "Traceback" not in ended.output + ended.errors
        *progress, last = ended.errors.splitlines()
        assert last.startswith("error: "), ended
        assert not [line for line in progress if line.startswith("error: ")]
        return last.removeprefix("error: ")

    def refused(self, *arguments: str | os.PathLike[str]) -> str:
        """Return the error of a command that fails before it prints anything else."""
        error = self.fails(*arguments)
        assert (self.ended.output, self.ended.errors) == ("", f"error: {error}\n")
        return error
