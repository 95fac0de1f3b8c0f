"""Blocks between fences in what a model wrote, as Markdown marks code and data."""

from __future__ import annotations

import re
from collections.abc import Collection

_BEFORE = r"(?P<before>[^\S\n]*(?:(?:[-*+]|\d{1,9}[.)])[^\S\n]+)?(?:<[^<>`\n]*>[^\S\n]*|[^`\n]*:[^\S\n]*)?)"
"""What may be in front of a fence: a list's mark, and a tag or words that end with a colon."""
_FENCE = re.compile(_BEFORE + r"(?P<marks>`{3,}|~{3,})(?P<info>[^\n`]*)")
_ONE_LINE = re.compile(_BEFORE + r"(?P<marks>`{3,})(?P<info>[\w.+#-]*)[^\S\n]+(?P<block>[^`\n]+)(?P=marks)")
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]+(?:\.\d+)*)")


def find_block(text: str, languages: Collection[str]) -> str:
    """Return the block of a text that is written in one of the languages, or the text if it has no block.

    It is the last one that is marked with a language, or else the last one without a mark, or else the last
    one. Empty blocks do not count. A block that is not closed ends with the text. Fences may be indented, and
    their indentation is removed from the block.

    Args:
        text: what the model wrote.
        languages: names in lower case. Digits and dots after them are versions, as in `python3`.

    Source: CommonMark 0.31.2, section 4.5, but with any indentation, and with what models write on the lines
    of fences.
    """
    best, rank = text, 0
    for language, block in _blocks(text):
        found = 3 if language.rstrip("0123456789.") in languages else 1 if language else 2
        if found >= rank and block.strip():
            best, rank = block, found
    return best


def _blocks(text: str) -> list[tuple[str, str]]:
    """Return the language, which may be empty, and the text of each block."""
    blocks: list[tuple[str, list[str]]] = []
    marks, indent = "", ""
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if marks:
            if fence and _closes(fence, marks):
                marks = ""
            else:
                blocks[-1][1].append(line.removeprefix(indent))
        elif fence:
            marks = fence["marks"]
            indent = re.sub(r"\S", " ", fence["before"])
            blocks.append((_language(fence["info"]), []))
        elif one_line := _ONE_LINE.fullmatch(line.rstrip()):
            blocks.append((_language(one_line["info"]), [one_line["block"]]))
    if marks and blocks[-1][1]:
        blocks[-1][1][-1] = blocks[-1][1][-1].rstrip().removesuffix(marks)  # closed behind the last line
    return [(language, "\n".join([*lines, ""])) for language, lines in blocks]


def _closes(fence: re.Match[str], marks: str) -> bool:
    """Return whether a fence closes a block: nothing, or no language, such as `</answer>`, is behind it."""
    is_bare = not fence["info"] or not (fence["info"][0].isalnum() or fence["info"][0] == "{")
    return is_bare and not fence["before"].strip() and fence["marks"].startswith(marks)


def _language(info: str) -> str:
    match = _LANGUAGE.match(info.lower())
    return match.group(1) if match else ""
