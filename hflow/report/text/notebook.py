"""`NotebookLive`: one output of a notebook's cell that is replaced again and again, by a thread."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

from hflow.base.terminal import REPORT_WIDTH, SafeConsole

SECONDS_BETWEEN = 0.25
"""Time between two updates."""
_PAGE = '<pre style="line-height:normal">{code}</pre>'


class NotebookLive:
    """Shows below the cell what a function returns, as `rich.live.Live` does in a terminal.

    `Live` itself needs a package with widgets in a notebook.

    Attributes:
        console: prints other lines to the cell.
    """

    def __init__(self, console: Console, get_renderable: Callable[[], RenderableType]) -> None:
        self.console = console
        self._get_renderable = get_renderable
        self._output: Any = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._update, name="hflow-notebook", daemon=True)

    def start(self) -> None:
        """Add the output to the cell that runs, and keep it up to date."""
        from IPython.display import display

        self._output = display(self._rendered(), raw=True, display_id=True)
        self._thread.start()

    def stop(self) -> None:
        """Show the last state."""
        self._ends.set()
        self._thread.join()
        self._show()

    def _update(self) -> None:
        while not self._ends.wait(SECONDS_BETWEEN):
            self._show()

    def _show(self) -> None:
        if self._output is not None:
            self._output.update(self._rendered(), raw=True)

    def _rendered(self) -> dict[str, str]:
        console = SafeConsole(
            file=io.StringIO(), record=True, width=REPORT_WIDTH, force_jupyter=False, color_system="truecolor"
        )
        console.print(self._get_renderable())
        text = console.export_text(clear=False)
        return {"text/plain": text, "text/html": console.export_html(code_format=_PAGE, inline_styles=True)}
