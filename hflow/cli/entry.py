"""Runs the command line, and turns what it raises into a line and an exit code."""

from __future__ import annotations

from typing import NoReturn

from rich.console import Console
from rich.text import Text

from hflow.cli.commands import app
from hflow.cli.exit_codes import INTERRUPTED, USER_ERROR, StoppedByUser
from hflow.errors import HflowError


def main() -> None:
    """Run the command line. A user's error is one line and exit code 2; Ctrl-C is 130."""
    try:
        app()
    except HflowError as error:
        _stop(str(error), USER_ERROR)
    except StoppedByUser:
        raise SystemExit(INTERRUPTED) from None
    except SystemExit as stop:
        if stop.code == INTERRUPTED:
            _stop("interrupted", INTERRUPTED)
        raise


def _stop(message: str, code: int) -> NoReturn:
    line = Text.assemble(("error: ", "bold red"), " ".join(message.split()))
    Console(stderr=True).print(line, soft_wrap=True)
    raise SystemExit(code)
