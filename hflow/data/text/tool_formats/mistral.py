"""`Mistral`: the formats of Mistral's models."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from hflow.data.text.tool_formats.interface import (
    NamedFormat,
    ParsedCalls,
    parsed_calls,
    read_call,
    read_json,
)
from hflow.data.text.tool_formats.tools import Tool
from hflow.data.text.turn_text import before_any
from hflow.types import ToolCall

_MARK = "[TOOL_CALLS]"


class Mistral(NamedFormat):
    """`[TOOL_CALLS]` before a list of objects with name and arguments, or before each `name[ARGS]{...}`."""

    server_parser: ClassVar[str | None] = "mistral"
    _call: ClassVar = re.compile(
        r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL
    )

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return _MARK in template

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return the calls after the mark."""
        head, *blocks = text.split(_MARK)
        calls: list[ToolCall | None] = []
        for block in blocks:
            if block.lstrip().startswith("["):
                calls += [_listed_call(item, tools) for item in _listed(block)]
            else:
                found = self._call.fullmatch(block)
                calls.append(None if found is None else read_call(found[1], read_json(found[3]), tools))
        return parsed_calls(text, head.rstrip(), calls)

    def result_id(self, text: str, number: int) -> str | None:
        """Return the id that the model wrote with the call, or one of the nine characters that are needed."""
        written: list[Any] = []
        for block in text.split(_MARK)[1:]:
            if block.lstrip().startswith("["):
                written += [item.get("id") if isinstance(item, dict) else None for item in _listed(block)]
            else:
                found = self._call.fullmatch(block)
                written.append(found and found[2])
        own = written[number] if number < len(written) else None
        return own if isinstance(own, str) and re.fullmatch(r"[a-zA-Z0-9]{9}", own) else f"c{number:08d}"

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of the mark."""
        return len(before_any(text, [_MARK]).rstrip())


def _listed(block: str) -> list[Any]:
    """Return the items of a list; one None if it is none. Text after it is ignored, as after other calls."""
    start = block.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return [None]
    found: Any = read_json(start[:end])
    return found if isinstance(found, list) else [None]


def _listed_call(item: Any, tools: Sequence[Tool]) -> ToolCall | None:
    return read_call(item.get("name"), item.get("arguments", {}), tools) if isinstance(item, dict) else None
