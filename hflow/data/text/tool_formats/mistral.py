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
    _call: ClassVar = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return _MARK in template

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return the calls after the mark."""
        head, *blocks = text.split(_MARK)
        calls: list[ToolCall | None] = []
        for block in blocks:
            calls += (
                _list_calls(block, tools) if block.lstrip().startswith("[") else [self._one(block, tools)]
            )
        return parsed_calls(text, head.rstrip(), calls)

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of the mark."""
        return len(before_any(text, [_MARK]).rstrip())

    def _one(self, block: str, tools: Sequence[Tool]) -> ToolCall | None:
        found = self._call.fullmatch(block)
        return None if found is None else read_call(found[1], read_json(found[2]), tools)


def _list_calls(block: str, tools: Sequence[Tool]) -> list[ToolCall | None]:
    """Return the calls of a list. Text after it is ignored, as after other calls."""
    start = block.lstrip()
    try:
        _, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return [None]
    found: Any = read_json(start[:end])
    if not isinstance(found, list):
        return [None]
    return [
        read_call(item.get("name"), item.get("arguments", {}), tools) if isinstance(item, dict) else None
        for item in found
    ]
