"""Makes a picture of what a command left on a terminal.

    COLUMNS=100 script -qc "hflow run smollm2" smollm2.typescript
    python docs/images/terminal.py smollm2.typescript "hflow run smollm2" smollm2.svg

A panel that is redrawn is shown as it was at last: a line is replaced by what is written over it.
"""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
UP = re.compile(r"\r?\x1b\[(?:\d*)A|\x1b\[2K|\r(?!\n)")
"""Moves to a line above, erases a line, or returns to its beginning."""


def last_screen(written: str) -> list[str]:
    """Return the lines that a terminal shows after everything was written to it."""
    lines, row = [""], 0
    for part in re.split(rf"({UP.pattern}|\n)", written):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part.endswith("A"):
            row = max(0, row - int(re.findall(r"(\d*)A", part)[0] or 1))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif part.startswith("\r"):
            continue
        else:
            lines[row] += part.replace("\r", "")
    return lines


def main(typescript: str, title: str, out: str) -> None:
    """Write the picture of a recorded terminal."""
    written = Path(typescript).read_bytes().decode()  # as text, \r would become \n
    body = [line for line in written.splitlines(keepends=True) if not line.startswith("Script ")]
    text = Text.from_ansi("\n".join(last_screen("".join(body))).strip())
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(text)
    console.save_svg(out, title=title)


if __name__ == "__main__":
    main(*sys.argv[1:])
