"""`Glm`: the format of GLM 4.5 and later."""

from __future__ import annotations

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
from hflow.data.text.tool_formats.tools import Tool, tool_name, tool_schema
from hflow.data.text.turn_text import before_any
from hflow.types import ToolCall


class Glm(NamedFormat):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with or without lines.

    Values are JSON, except those of parameters that are texts.
    """

    server_parser: ClassVar[str | None] = "glm45"
    _block: ClassVar = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
    _argument: ClassVar = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return "<arg_key>" in template

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return every closed block that names a tool."""
        blocks = self._block.findall(text)
        calls = [self._read(body, tools) if end else None for body, end in blocks]
        return parsed_calls(text, text.partition("<tool_call>")[0].rstrip(), calls)

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of the first block."""
        return len(before_any(text, ["<tool_call>"]).rstrip())

    def _read(self, body: str, tools: Sequence[Tool]) -> ToolCall | None:
        name = body.partition("<arg_key>")[0].strip()
        rest = self._argument.sub("", body).strip()
        tool = next((tool for tool in tools if tool_name(tool) == name), None)
        if tool is None or rest != name:
            return None
        properties = (tool_schema(tool)["function"].get("parameters") or {}).get("properties") or {}
        pairs = self._argument.findall(body)
        arguments = {key.strip(): _value(value, properties.get(key.strip())) for key, value in pairs}
        return read_call(name, arguments, tools)


def _value(text: str, schema: Any) -> Any:
    """Return a value; a text if the schema says so, or if it is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    value = read_json(text.strip())
    return text if value is None and text.strip() != "null" else value
