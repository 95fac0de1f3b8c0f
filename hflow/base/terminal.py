"""Prints what a command has to say, so that no text can change the terminal that shows it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

REPORT_WIDTH = 100
"""Columns of a report that goes to a file or a pipe."""

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and newline; what changes the direction of text; what UTF-8 cannot encode."""


def safe_text(text: str) -> str:
    r"""Return text that a terminal only shows: each control character becomes its escape, such as `\x1b`.

    `SafeConsole` does so too, but tables and paddings measure their texts before.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


class SafeConsole(Console):
    """A console that shows text of models, rows and errors as it is: no markup, codes or escape sequences."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable, of which only rich's own control the terminal."""
        for segment in super().render(renderable, options):
            is_text = segment.control is None
            yield Segment(safe_text(segment.text), segment.style) if is_text else segment


def print_text(text: str) -> None:
    """Print for people, whatever the terminal's width."""
    _write(safe_text(text))


def print_data(text: str) -> None:
    """Print for programs: as it is, except on a terminal."""
    _write(safe_text(text) if sys.stdout.isatty() else text)


def print_json(value: Any) -> None:
    """Print plain values for programs, as one JSON document."""
    print_data(json.dumps(value, indent=2))


def print_note(line: str) -> None:
    """Print a dim line to standard error, separate from the report."""
    SafeConsole(stderr=True).print(line, style="dim", soft_wrap=True, highlight=False)


def show(report: RenderableType) -> None:
    """Print for people, as wide as the terminal."""
    console = SafeConsole()
    if not console.is_terminal:
        console = SafeConsole(width=REPORT_WIDTH)
    console.print(report, crop=False)


def _write(text: str) -> None:
    sys.stdout.write(text.rstrip() + "\n")
    sys.stdout.flush()
