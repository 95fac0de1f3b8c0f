"""Pictures in a terminal: two pixels in each character."""

from __future__ import annotations

from rich.color import Color
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from hflow.base.errors import HflowError
from hflow.types.image import Image

WIDTH = 40
"""Columns of the widest picture."""


class Picture:
    """A picture of a data URL, where the terminal has colours; elsewhere, such as in a file, its size."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the picture."""
        try:
            image = Image.of_url(self._url)
            has_colours = console.is_terminal and console.color_system in ("256", "truecolor")
            picture = image.open() if has_colours else None
        except HflowError as error:
            yield Text(f"[image that cannot be shown: {error}]", style="dim")
            return
        yield Text(f"[image {image.width} x {image.height}]", style="dim")
        if picture is None:
            return
        columns = min(WIDTH, options.max_width, picture.width)
        rows = max(1, round(picture.height * columns / picture.width / 2))
        small = picture.resize((columns, 2 * rows))
        for row in range(rows):
            line = Text()
            for column in range(columns):
                upper, lower = (small.getpixel((column, 2 * row + half)) for half in (0, 1))
                line.append("▀", Style(color=_color(upper), bgcolor=_color(lower)))
            yield line


def _color(pixel: object) -> Color:
    assert isinstance(pixel, tuple), "the picture has mode RGB"
    return Color.from_rgb(*pixel)
