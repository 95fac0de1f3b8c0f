"""`NotebookLive`: one output of a notebook's cell that is replaced again and again, from any thread."""

from __future__ import annotations

import io
import time
from typing import Any

from rich.console import Console, RenderableType

from hflow.base.terminal import REPORT_WIDTH, SafeConsole

SECONDS_BETWEEN = 0.25
"""Shortest time between two updates."""
_PAGE = '<pre style="line-height:normal">{code}</pre>'


class NotebookLive:
    """Shows the newest renderable below the cell, as `rich.live.Live` does in a terminal.

    `Live` itself needs a package with widgets in a notebook.

    Attributes:
        console: prints other lines to the cell.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._output: Any = None
        self._newest: RenderableType = ""
        self._updated_at = 0.0

    def start(self) -> None:
        """Add the output to the cell that runs."""
        from IPython.display import display

        self._output = display(self._rendered(), raw=True, display_id=True)

    def update(self, renderable: RenderableType) -> None:
        """Replace the output, unless that was done a moment ago."""
        self._newest = renderable
        if time.monotonic() - self._updated_at > SECONDS_BETWEEN:
            self._show()

    def stop(self) -> None:
        """Show the newest renderable."""
        self._show()

    def _show(self) -> None:
        self._updated_at = time.monotonic()
        if self._output is not None:
            self._output.update(self._rendered(), raw=True)

    def _rendered(self) -> dict[str, str]:
        """Return the newest renderable by MIME type."""
        console = SafeConsole(
            file=io.StringIO(), record=True, width=REPORT_WIDTH, force_jupyter=False, color_system="truecolor"
        )
        console.print(self._newest)
        text = console.export_text(clear=False)
        return {"text/plain": text, "text/html": console.export_html(code_format=_PAGE, inline_styles=True)}
