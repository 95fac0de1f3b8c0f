"""Formats whose arguments have a tag each: `Glm` of GLM 4.5 and later, and `QwenCoder` of Qwen3-Coder."""

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

_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)


class _Tagged(NamedFormat):
    """A block per call, which has the name of the tool and a tag for each argument.

    Values are JSON, except those of parameters that are texts.
    """

    _call: ClassVar[re.Pattern[str]]
    """A block without its own tags: the name of the tool, and what has the arguments."""
    _argument: ClassVar[re.Pattern[str]]
    """An argument: its name and value."""

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return every closed block that names a tool."""
        blocks = _BLOCK.findall(text)
        calls = [self._read(body, tools) if end else None for body, end in blocks]
        return parsed_calls(text, text.partition("<tool_call>")[0].rstrip(), calls)

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of the first block."""
        return len(before_any(text, ["<tool_call>"]).rstrip())

    def _read(self, body: str, tools: Sequence[Tool]) -> ToolCall | None:
        call = self._call.fullmatch(body.strip())
        if call is None or self._argument.sub("", call[2]).strip():
            return None
        name = call[1].strip()
        tool = next((tool for tool in tools if tool_name(tool) == name), None)
        if tool is None:
            return None
        properties = (tool_schema(tool)["function"].get("parameters") or {}).get("properties") or {}
        pairs = self._argument.findall(call[2])
        arguments = {key.strip(): _value(value, properties.get(key.strip())) for key, value in pairs}
        return read_call(name, arguments, tools)


class Glm(_Tagged):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, also with lines."""

    server_parser: ClassVar[str | None] = "glm45"
    _call: ClassVar = re.compile(r"(.*?)((?:<arg_key>.*)?)", re.DOTALL)
    _argument: ClassVar = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return "<arg_key>" in template


class QwenCoder(_Tagged):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with lines."""

    server_parser: ClassVar[str | None] = "qwen3_coder"
    _call: ClassVar = re.compile(r"<function=([^>]*)>(.*)</function>", re.DOTALL)
    _argument: ClassVar = re.compile(r"<parameter=([^>]*)>\n?(.*?)\n?</parameter>", re.DOTALL)

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return "<function=" in template and "<parameter=" in template


def _value(text: str, schema: Any) -> Any:
    """Return a value; a text if the schema says so, or if it is no JSON. Some templates write `True`."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" or (isinstance(kind, list) and "string" in kind):
        return text
    stripped = text.strip()
    if kind == "boolean" and stripped in ("True", "False"):
        return stripped == "True"
    value = read_json(stripped)
    return text if value is None and stripped != "null" else value
