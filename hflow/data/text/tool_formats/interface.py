"""`ToolFormat`: a format of tool calls, which parses the text of a turn.

Text that is not a call stays text. A block that looks like a call but is invalid (broken JSON, an unknown
tool) stays text too, and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hflow.base.errors import RecipeError
from hflow.base.json_text import find_json_problem, parse_json
from hflow.data.text.tool_formats.tools import Tool, accepts, tool_name
from hflow.types import ToolCall


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
    def server_parser(self) -> str | None:
        """The name of the format's parser in vLLM's own server; None if it has none."""
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

    def num_safe(self, text: str) -> int:
        """Return the length of an unfinished turn's beginning that is text, whatever follows."""
        ...

    def failure(self, message: str) -> str:
        """Return the text that the model reads when a tool has failed."""
        ...

    def result_id(self, text: str, number: int) -> str | None:
        """Return the id that chat templates need with the result of a call; None if they need none.

        Args:
            text: the turn with the call.
            number: the call's number in the turn, from 0.
        """
        ...


class NamedFormat:
    """The base of formats whose calls name a tool, and whose tools the chat template describes."""

    server_parser: ClassVar[str | None] = None
    is_described: ClassVar[bool] = True
    stop: ClassVar[tuple[str, ...]] = ()

    def check(self, tools: Sequence[Tool]) -> None:
        """Check that names differ."""
        names = [tool_name(tool) for tool in tools]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise RecipeError(
                f"two tools are named {repeated[0]!r}, but a model calls tools by name; rename one"
            )

    def failure(self, message: str) -> str:
        """Return the error."""
        return f"error: {message}"

    def result_id(self, text: str, number: int) -> str | None:
        """Return None: results have no ids."""
        return None


def parsed_calls(text: str, head: str, calls: Sequence[ToolCall | None]) -> ParsedCalls:
    """Return the calls of a turn.

    Args:
        text: the turn.
        head: the text in front of the calls.
        calls: a call for each block that looks like one; None for an invalid one.
    """
    valid = tuple(call for call in calls if call is not None)
    return ParsedCalls(valid, len(calls) - len(valid), head if valid else text)


def read_call(name: object, arguments: object, tools: Sequence[Tool]) -> ToolCall | None:
    """Return a call; None if there is no such tool, or the arguments are no JSON object that it accepts."""
    tool = next((tool for tool in tools if tool_name(tool) == name), None)
    if tool is None or not isinstance(arguments, dict) or find_json_problem(arguments):
        return None
    return ToolCall(str(name), arguments) if accepts(tool, arguments) else None


def read_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def read_object(text: str, key: str, tools: Sequence[Tool]) -> ToolCall | None:
    """Return the call of a JSON object with `name` and arguments under `key`; None if it is invalid."""
    block = read_json(text)
    return read_call(block.get("name"), block.get(key, {}), tools) if isinstance(block, dict) else None
