"""`TurnText`: the text of a turn while its tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for the first bytes of a character."""


class TurnText:
    """The part of a turn's text that later tokens cannot change.

    Held back are the bytes of an unfinished character, what may become a stop string, and what may be a tool
    call.

    Args:
        num_safe: length of the beginning of a text that is in front of all tool calls, whatever follows; None
            if there are no tools.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stops: Sequence[str],
        num_safe: Callable[[str], int] | None = None,
    ) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._num_safe = num_safe
        self._ids: list[int] = []
        self._start = self._end = 0
        """Tokens up to `_end` are in `_text`. Those from `_start` on are decoded again with the next ones, as
        a decoder may treat the first token in another way."""
        self._text = ""
        self._num_taken = 0

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens, and return the text that became certain."""
        self._ids += ids
        known = self._decode(self._ids[self._start : self._end])
        longer = self._decode(self._ids[self._start :])
        if len(longer) > len(known) and not longer.endswith(_UNFINISHED):
            self._text += longer[len(known) :]
            self._start, self._end = self._end, len(self._ids)
        end = min(len(before_any(self._text, self._stops)), self._safe_length())
        taken, self._num_taken = self._num_taken, max(self._num_taken, end)
        return self._text[taken : self._num_taken]

    def _safe_length(self) -> int:
        return len(self._text) if self._num_safe is None else self._num_safe(self._text)


def before_any(text: str, marks: Sequence[str]) -> str:
    """Return a text up to the first of some marks, without an end that may be the beginning of one."""
    found = [position for mark in marks if (position := text.find(mark)) >= 0]
    if found:
        text = text[: min(found)]
    longest = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - longest]
