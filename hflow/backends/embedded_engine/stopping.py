"""When a sequence ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hflow.backends.embedded_engine.request import Request

Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4
"""Most tokens that one character can take: the bytes of its UTF-8 code."""


def stop_reason(request: Request, decode: Decode | None) -> str | None:
    """`stop` or `length` when the token just drawn ends the request, else None."""
    if request.ids[-1] in request.stop_ids:
        return "stop"
    if request.params.stop and decode is not None and _ends_with_stop(request, decode):
        return "stop"
    return "length" if len(request.ids) >= request.max_length else None


def _ends_with_stop(request: Request, decode: Decode) -> bool:
    """Whether a stop string is in the last drawn characters.

    Only as many tokens as the longest stop string can span are decoded; an earlier occurrence
    would have ended the request earlier.
    """
    stops = request.params.stop
    window = _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1
    first_drawn = request.num_prompt - request.params.num_resumed
    text = decode(request.ids[max(first_drawn, len(request.ids) - window) :])
    return any(stop in text for stop in stops)
