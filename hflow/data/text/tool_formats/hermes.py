"""`Hermes`: the format of Hermes and Qwen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from hflow.data.text.tool_formats.interface import NamedFormat, ParsedCalls, parsed_calls, read_object
from hflow.data.text.tool_formats.tools import Tool
from hflow.data.text.turn_text import before_any


class Hermes(NamedFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    server_parser: ClassVar[str | None] = "hermes"
    _block: ClassVar = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format. Others put XML into the same tags."""
        return "<tool_call>" in template and "<arg_key>" not in template and "<function=" not in template

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return every closed block that names a tool."""
        blocks = self._block.findall(text)
        calls = [read_object(body, "arguments", tools) if end else None for body, end in blocks]
        return parsed_calls(text, text.partition("<tool_call>")[0].rstrip(), calls)

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of the first block."""
        return len(before_any(text, ["<tool_call>"]).rstrip())
