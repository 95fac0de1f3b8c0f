"""The output of `hflow translate`: what was written, and the keys that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from hflow.base.errors import shorten

if TYPE_CHECKING:
    from hflow.launch import Translation
    from hflow.translate import Entry
    from hflow.translate.given import Place

_LISTED = {
    "unknown": "Unknown keys",
    "value": "Values that were not translated",
    "differs": "Translated, with another meaning",
    "manual": "To write by hand",
    "missing": "Keys without a counterpart",
}
"""Reason of a key that is left -> the title of its list."""


def render_translation(made: Translation) -> RenderableType:
    """Return the lists of keys that are left, and a summary of the others."""
    name = made.peer.name
    parts: list[RenderableType] = [Text(str(made.recipe)), Text(str(made.settings))]
    given = [entry for entry in made.entries if entry.is_given]
    for reason, title in _LISTED.items():
        listed = [entry for entry in made.entries if entry.reason == reason and entry.needs_attention]
        parts += _section(title, listed, name)
    quiet = [entry for entry in given if entry.place == "left" and not entry.needs_attention]
    if quiet:
        title = f"Without effect here, or at {name}'s default and without a counterpart"
        names = ", ".join(f"{entry.key}" for entry in quiet)
        shown = names if len(quiet) <= MAX_NAMES else f"{len(quiet)} keys, which --json lists"
        parts += [Text(f"\n{title}", style="bold"), Text(f"  {shown}", style="dim")]
    counts = Counter(entry.place for entry in given)
    summary = ", ".join(f"{counts[place]} {word}" for place, word in _PLACES.items())
    looked_at = sum(entry.needs_attention for entry in given)
    parts += [
        Text(f"\n{len(given)} keys of {name} {made.peer.version}: {summary} ({looked_at} listed above)")
    ]
    parts += [Text(f"next: write the body of score in {made.recipe}, then hflow check {made.recipe}")]
    return Group(*parts)


_PLACES: Mapping[Place, str] = {"translated": "translated", "automatic": "chosen by hflow", "left": "left"}
MAX_NAMES = 40
"""Keys that change nothing and are named. A file with all keys of verl has hundreds."""


def _section(title: str, entries: Sequence[Entry], library: str) -> Iterator[RenderableType]:
    """Yield two lines for each key: its value, and what to know."""
    if entries:
        yield Text(f"\n{title}", style="bold")
    for entry in entries:
        value = shorten(str(entry.value), 60) + ("" if entry.is_given else f" ({library}'s default)")
        yield Text.assemble(f"  {entry.key}: {value}", (f"\n      {entry.note}" if entry.note else "", "dim"))
