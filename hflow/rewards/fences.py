"""Blocks between fences in what a model wrote, as Markdown marks code and data."""

from __future__ import annotations

import re
from collections.abc import Collection

_FENCE = re.compile(r"(?P<indent>[^\S\n]*)(?P<marks>`{3,}|~{3,})[^\S\n]*(?P<info>[^\n`]*)")


def find_block(text: str, languages: Collection[str]) -> str:
    """Return the block of a text that is written in one of the languages, or the text if it has no block.

    It is the last one that is marked with a language, or else the last one without a mark, or else the last
    one. A block that is not closed ends with the text. Fences may be indented, and their indentation is
    removed from the block.

    Args:
        text: what the model wrote.
        languages: names in lower case. Digits and dots after them are versions, as in `python3`.

    Source: CommonMark 0.31.2, section 4.5, but with any indentation.
    """
    best, rank = text, 0
    for language, block in _blocks(text):
        found = 3 if language.rstrip("0123456789.") in languages else 1 if language else 2
        if found >= rank:
            best, rank = block, found
    return best


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the language, which may be empty, and the text of each block."""
    blocks: list[tuple[str, list[str]]] = []
    marks, indent = "", ""
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if marks:
            if fence and not fence["info"] and fence["marks"].startswith(marks):
                marks = ""
            else:
                blocks[-1][1].append(line.removeprefix(indent))
        elif fence:
            marks, indent = fence["marks"], fence["indent"]
            words = fence["info"].lower().strip("{. ").split(maxsplit=1)
            blocks.append((words[0].rstrip("}") if words else "", []))
    return [(language, "\n".join([*lines, ""])) for language, lines in blocks]
