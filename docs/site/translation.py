"""Tables of the keys of other libraries, from `hflow.translate`, in the pages of `docs/coming-from`.

    python docs/site/translation.py

writes them between the comments `<!-- keys: NAME -->` and `<!-- end of keys -->` of each page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hflow.translate import Peer, Row, peers

PAGES = Path(__file__).parents[1] / "coming-from"


def key_tables(peer: Peer) -> str:
    """Return a section for each part of a library's configuration, in Markdown."""
    sections = (_section(peer.name, title, rows) for title, rows in peer.tables.items())
    return "\n\n".join("\n".join(section) for section in sections)


def _section(library: str, title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"### {title}", "", f"| {library} | hflow | notes |", "|-|-|-|")
    for row in rows:
        ours = ", ".join(f"`{key}`" for key in row.ours)
        if row.status == "same":
            hflow, note = ours or "in the recipe", row.note
        else:
            hflow = "by hand" if row.status == "manual" else row.status
            note = "; ".join(part for part in (row.note, ours) if part)
        yield f"| `{row.key}` | {hflow} | {note} |".replace("  ", " ")
        yield from (f"| `{row.key}: {value}` | {text} | |" for value, text in row.values.items())


def filled(page: str, peer: Peer) -> str:
    """Return a page with the tables of a library between its comments."""
    start, end = f"<!-- keys: {peer.name} -->", "<!-- end of keys -->"
    before, rest = page.split(start)
    return f"{before}{start}\n\n{key_tables(peer)}\n\n{end}{rest.split(end)[1]}"


def page_of(peer: Peer) -> Path:
    """Return the page of a library."""
    return PAGES / f"{peer.name.lower()}.md"


if __name__ == "__main__":
    for peer in peers():
        page = page_of(peer)
        page.write_text(filled(page.read_text(encoding="utf-8"), peer), encoding="utf-8")
