"""Tools that a model may call, their schemas for chat templates, and the formats of calls, one class each.

A tool is a function or a JSON schema. A format parses the text of a turn. Text that is not a call stays text.
A block that looks like a call but is invalid (broken JSON, an unknown tool) stays text too, and is counted.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol, get_args, get_origin, get_type_hints

from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from hflow.base.errors import RecipeError
from hflow.base.json_text import find_json_problem, parse_json
from hflow.types import ToolCall

Tool = Callable[..., Any] | Mapping[str, Any]
"""A function, or the JSON schema of one in the form of OpenAI's API and of chat templates."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def tool_name(tool: Tool) -> str:
    """Return the name by which a model calls a tool."""
    return str(tool["function"]["name"]) if isinstance(tool, Mapping) else tool.__name__


def parameter_names(tool: Tool) -> tuple[str, ...]:
    """Return the names of a tool's parameters, in order."""
    if isinstance(tool, Mapping):
        return tuple((tool["function"].get("parameters") or {}).get("properties") or {})
    return tuple(inspect.signature(tool).parameters)


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool in the form that chat templates expect.

    A function's docstring in Google style also describes the parameters; any other describes only the tool.

    Raises:
        RecipeError: if a parameter has no annotation, or one without a JSON type.
    """
    return dict(tool) if isinstance(tool, Mapping) else dict(_function_schema(tool))


@lru_cache(256)
def _function_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    try:
        return dict(get_json_schema(tool))
    except DocstringParsingException:
        return _from_signature(tool)
    except TypeHintParsingException as error:
        raise RecipeError(f"tool {tool.__name__!r} cannot be described to a model: {error}") from error


def _from_signature(tool: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(tool)
    parameters = inspect.signature(tool).parameters
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": tool.__name__,
            "description": inspect.getdoc(tool) or "",
            "parameters": {
                "type": "object",
                "properties": {name: _property(tool, name, hints) for name in parameters},
                "required": required,
            },
        },
    }


def _property(tool: Callable[..., Any], name: str, hints: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one parameter."""
    if name not in hints:
        raise RecipeError(f"tool {tool.__name__!r} cannot be described to a model: annotate {name!r}")
    hint = hints[name]
    kind = _TYPES.get(get_origin(hint) or hint)
    if kind is None:
        raise RecipeError(
            f"tool {tool.__name__!r} cannot be described to a model: {name!r} is {hint}; "
            f"annotate it with one of {', '.join(t.__name__ for t in _TYPES)}, or describe it in the "
            "docstring's Args"
        )
    items = [_TYPES[inner] for inner in get_args(hint)[:1] if inner in _TYPES]
    return {"type": kind, "items": {"type": items[0]}} if kind == "array" and items else {"type": kind}


@dataclass(frozen=True)
class ParsedCalls:
    """The calls in a turn, the text in front of them, and the number of invalid blocks."""

    calls: tuple[ToolCall, ...]
    num_malformed: int = 0
    text: str = ""
    """The whole turn, if there are no calls."""


class ToolFormat(Protocol):
    """A format of tool calls."""

    @property
    def vllm_parser(self) -> str | None:
        """The parser of vLLM's server for the format; None if it has none."""
        ...

    @property
    def is_described(self) -> bool:
        """Whether the chat template describes the tools to the model."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn, besides the node's own."""
        ...

    def check(self, tools: Sequence[Tool]) -> None:
        """Check that the format can distinguish the tools.

        Raises:
            RecipeError: if it cannot; says which tools can be offered.
        """
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return the calls in the text of a turn, stop strings included."""
        ...

    def failure(self, message: str) -> str:
        """Return the text that the model reads when a tool has failed."""
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes and Qwen."""

    vllm_parser: ClassVar[str | None] = "hermes"
    is_described: ClassVar[bool] = True
    stop: ClassVar[tuple[str, ...]] = ()
    _block: ClassVar = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def check(self, tools: Sequence[Tool]) -> None:
        """Check that names differ."""
        names = [tool_name(tool) for tool in tools]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise RecipeError(
                f"two tools are named {repeated[0]!r}, but a model calls tools by name; rename one"
            )

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return every closed block that names a tool."""
        names = [tool_name(tool) for tool in tools]
        blocks = [_json_call(body, names) if end else None for body, end in self._block.findall(text)]
        calls = tuple(call for call in blocks if call is not None)
        head = text.partition("<tool_call>")[0].rstrip() if calls else text
        return ParsedCalls(calls, len(blocks) - len(calls), head)

    def failure(self, message: str) -> str:
        """Return the error."""
        return f"error: {message}"


@dataclass(frozen=True)
class Marked:
    """A call as text between two characters, such as `[12+34]`, for models with a small alphabet.

    The text is the first argument of the only tool. The second character ends the turn, and the tool's answer
    follows unchanged. A third character, if there is one, replaces the error of a tool that failed.
    """

    opening: str
    closing: str
    failed: str = ""
    vllm_parser: ClassVar[str | None] = None
    is_described: ClassVar[bool] = False

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing character."""
        return (self.closing,)

    def check(self, tools: Sequence[Tool]) -> None:
        """Check that there is one tool with an argument, as calls have no name."""
        if len(tools) > 1:
            raise RecipeError(
                f"tool_format={self.opening + self.closing!r} has no names, so it offers one tool, "
                f"not {len(tools)}; use a tokenizer with a chat template"
            )
        for tool in tools:
            if not parameter_names(tool):
                raise RecipeError(
                    f"tool {tool_name(tool)!r} takes no argument, but a call between marks needs one; add it"
                )

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Return the marked text that ends the turn."""
        turn, closed, _ = text.partition(self.closing)
        head, opened, argument = turn.rpartition(self.opening)
        if not (closed and opened):
            return ParsedCalls((), turn.count(self.opening) + bool(closed), text)
        call = ToolCall(tool_name(tools[0]), {parameter_names(tools[0])[0]: argument})
        return ParsedCalls((call,), head.count(self.opening), head)

    def failure(self, message: str) -> str:
        """Return the third character, or the error."""
        return self.failed or f"error: {message}"


FORMATS: dict[str, Callable[[], ToolFormat]] = {"hermes": Hermes}
"""Name, as in a node's `tool_format` -> constructor."""
DEFAULT_FORMAT = "hermes"
"""The format of models whose chat template describes tools."""


def tool_format(option: str | None, has_template: bool) -> ToolFormat:
    """Return the format of a generate node.

    Args:
        option: the node's `tool_format`: a name, two or three characters, or None for the default.
        has_template: whether the tokenizer has a chat template, which describes tools.

    Raises:
        RecipeError: if the option is invalid, or the tokenizer cannot describe tools.
    """
    if option is not None and _are_marks(option):
        return Marked(*option)
    if (name := DEFAULT_FORMAT if option is None else option) not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise RecipeError(
            f"tool_format is {option!r}; set it to {known}, or to two different characters such as '[]'"
        )
    if not has_template:
        raise RecipeError(
            "this tokenizer has no chat template to describe tools with; set the generate node's tool_format "
            "to the two characters that enclose a call, such as '[]'"
        )
    return FORMATS[name]()


def _are_marks(option: str) -> bool:
    """Return whether the option is two or three different characters, none of them a letter or digit."""
    return len(option) in (2, 3) and len(set(option)) == len(option) and not any(map(str.isalnum, option))


def _json_call(text: str, names: Sequence[str]) -> ToolCall | None:
    try:
        block = parse_json(text)
    except ValueError:
        return None
    if find_json_problem(block) or not isinstance(block, dict) or block.get("name") not in names:
        return None
    arguments = block.get("arguments", {})
    return ToolCall(block["name"], arguments) if isinstance(arguments, dict) else None
