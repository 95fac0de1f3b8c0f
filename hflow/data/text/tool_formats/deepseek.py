"""`DeepSeek`: the formats of DeepSeek V3, R1 and V3.1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

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

_BEGIN, _CALL, _END, _SEPARATOR = (
    f"<\N{FULLWIDTH VERTICAL LINE}tool\N{LOWER ONE EIGHTH BLOCK}{name}\N{FULLWIDTH VERTICAL LINE}>"
    for name in (
        "calls\N{LOWER ONE EIGHTH BLOCK}begin",
        "call\N{LOWER ONE EIGHTH BLOCK}begin",
        "call\N{LOWER ONE EIGHTH BLOCK}end",
        "sep",
    )
)
"""The tokens of DeepSeek's calls, with the characters that it takes for `|` and `_`."""
_FENCE = "```json"


class DeepSeekV31(NamedFormat):
    """`name<sep>{...}` between marks of each call, and of all calls."""

    server_parser: ClassVar[str | None] = "deepseek_v31"
    _block: ClassVar = re.compile(rf"{_CALL}(.*?)({_END}|(?={_CALL})|\Z)", re.DOTALL)

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return _BEGIN in template and _FENCE not in template

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return every closed block."""
        head, mark, body = text.partition(_BEGIN)
        blocks = self._block.findall(body)
        calls = [self._read(block, tools) if end else None for block, end in blocks]
        return parsed_calls(text, head.rstrip(), calls if blocks or not mark else [None])

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of all calls."""
        return len(before_any(text, [_BEGIN]).rstrip())

    def _read(self, block: str, tools: Sequence[Tool]) -> ToolCall | None:
        name, _, arguments = block.partition(_SEPARATOR)
        return read_call(name.strip(), read_json(arguments), tools)


class DeepSeekV3(DeepSeekV31):
    """The same marks, but a call is `function<sep>name` and its arguments in a fence for JSON."""

    server_parser: ClassVar[str | None] = "deepseek_v3"

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return _BEGIN in template and _FENCE in template

    def _read(self, block: str, tools: Sequence[Tool]) -> ToolCall | None:
        kind, _, rest = block.partition(_SEPARATOR)
        name, _, arguments = rest.partition(_FENCE)
        arguments, fence, _ = arguments.rpartition("```")
        is_call = kind.strip() == "function" and fence
        return read_call(name.strip(), read_json(arguments), tools) if is_call else None
