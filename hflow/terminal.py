"""Prints what a command has to say."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType

REPORT_WIDTH = 100
"""Columns of a report that goes to a file or a pipe."""


def print_text(text: str) -> None:
    """Print as it is, whatever the terminal's width."""
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """Print plain values for programs, as one JSON document."""
    print_text(json.dumps(value, indent=2))


def show(report: RenderableType) -> None:
    """Print for people, as wide as the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)
    console.print(report, crop=False)
