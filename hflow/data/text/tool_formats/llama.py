"""`LlamaJson` and `Pythonic`: the formats of Llama 3 and 4. A turn is text or calls, not both."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from hflow.data.text.tool_formats.interface import (
    NamedFormat,
    ParsedCalls,
    parsed_calls,
    read_call,
    read_object,
)
from hflow.data.text.tool_formats.tools import Tool
from hflow.data.text.turn_text import before_any
from hflow.types import ToolCall

_JSON_NAMES = {"true": True, "false": False, "null": None}


class LlamaJson(NamedFormat):
    """`{"name": ..., "parameters": {...}}` of Llama 3, alone or after `<|python_tag|>`; several with `;`."""

    server_parser: ClassVar[str | None] = "llama3_json"
    _tag: ClassVar = "<|python_tag|>"
    _object: ClassVar = re.compile(r'\s*\{\s*"name"')

    @staticmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes the format."""
        return "<|start_header_id|>" in template and '"parameters"' in template

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return the calls of a turn that begins with one, or of what follows the tag."""
        head, tag, body = text.partition(self._tag)
        if not tag:
            head, body = "", text
            if not self._object.match(text):
                return ParsedCalls((), 0, text)
        calls = [read_object(block, "parameters", tools) for block in _objects(body)]
        return parsed_calls(text, head.rstrip(), calls)

    def num_safe(self, text: str) -> int:
        """Return 0 for a turn that may be a call, else the length of what is in front of the tag."""
        start = text.lstrip()
        return 0 if start[:1] in ("", "{") else len(before_any(text, [self._tag]).rstrip())


class Pythonic(NamedFormat):
    """`[name(key="value"), ...]` of Llama 3.2 and 4; some write `<|python_start|>` before it."""

    server_parser: ClassVar[str | None] = "pythonic"
    _start: ClassVar = "<|python_start|>"
    _list: ClassVar = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")

    @staticmethod
    def is_in(template: str) -> bool:
        """Return False: templates leave it to the prompt."""
        return False

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return the calls of a turn that is a list of them."""
        head, start, body = text.partition(self._start)
        body = body.partition("<|python_end|>")[0] if start else text
        if not self._list.match(body):
            return ParsedCalls((), int(bool(start)), text)
        try:
            tree: Any = ast.parse(body.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ParsedCalls((), 1, text)
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return parsed_calls(
            text, head.rstrip() if start else "", [_python_call(node, tools) for node in nodes]
        )

    def num_safe(self, text: str) -> int:
        """Return 0 for a turn that may be a call, else the length of what is in front of the start."""
        start = text.lstrip()
        return 0 if start[:1] in ("", "[") else len(before_any(text, [self._start]).rstrip())


def _objects(text: str) -> list[str]:
    """Return the JSON objects of a text, which semicolons may separate, and what is none."""
    found: list[str] = []
    rest = text.strip()
    while rest:
        try:
            _, end = json.JSONDecoder().raw_decode(rest)
        except (ValueError, RecursionError):
            return [*found, rest]
        found.append(rest[:end])
        rest = rest[end:].lstrip("; \n\t")
    return found


def _python_call(node: ast.expr, tools: Sequence[Tool]) -> ToolCall | None:
    """Return the call of an expression `name(key=value)`; None if it is none, or a value is no JSON."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    try:
        given = {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
        arguments = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError, MemoryError):
        return None
    is_named = all(keyword.arg is not None for keyword in node.keywords)
    return read_call(ast.unparse(node.func), arguments, tools) if is_named else None


def _python_value(node: ast.expr) -> Any:
    """Return the value of a literal, in which the names of JSON may occur."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("keys of JSON are texts")
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    return ast.literal_eval(node)
