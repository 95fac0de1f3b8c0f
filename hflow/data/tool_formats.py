"""How a model writes a tool call, and how it is read: one class a format.

The text of a turn is read; what is no call stays text. A block that looks like a call but is none
(broken JSON, an unknown tool) is text too, and is counted.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from hflow.errors import RecipeError
from hflow.types import ToolCall

Tool = Callable[..., Any]


@dataclass(frozen=True)
class ParsedCalls:
    """The calls in a turn, and how many blocks looked like one."""

    calls: tuple[ToolCall, ...]
    num_malformed: int = 0


class ToolFormat(Protocol):
    """One way to write calls."""

    @property
    def is_described(self) -> bool:
        """Whether the chat template tells the model of the tools; else it must know them."""
        ...

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn besides the node's own."""
        ...

    def check(self, tools: Sequence[Tool]) -> None:
        """Refuse tools that the format cannot tell apart.

        Raises:
            RecipeError: saying which can be offered.
        """
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """The calls in the text of a turn, stop texts included."""
        ...

    def failure(self, message: str) -> str:
        """What a model reads of a tool that failed."""
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write calls."""

    is_described: ClassVar[bool] = True
    stop: ClassVar[tuple[str, ...]] = ()
    _block: ClassVar = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def check(self, tools: Sequence[Tool]) -> None:
        """Names must differ."""
        names = [tool.__name__ for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RecipeError(f"two tools are named {twice[0]!r}; a model calls tools by name, rename one")

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """Every closed block that names a tool."""
        names = [tool.__name__ for tool in tools]
        blocks = [_json_call(body, names) if end else None for body, end in self._block.findall(text)]
        calls = tuple(call for call in blocks if call is not None)
        return ParsedCalls(calls, len(blocks) - len(calls))

    def failure(self, message: str) -> str:
        """The error, as such."""
        return f"error: {message}"


@dataclass(frozen=True)
class Marked:
    """The one tool's first argument between two characters, `[12+34]`, for models of a small alphabet.

    The second character ends the turn. A tool's answer follows as it stands; a third one, where
    there is one, stands for the error of a tool that failed.
    """

    opening: str
    closing: str
    failed: str = ""
    is_described: ClassVar[bool] = False

    @property
    def stop(self) -> tuple[str, ...]:
        """The closing character."""
        return (self.closing,)

    def check(self, tools: Sequence[Tool]) -> None:
        """Calls bear no name, so there can be one tool, with one argument."""
        if len(tools) > 1:
            raise RecipeError(
                f"tool_format={self.opening + self.closing!r} has no names, so it offers one tool, "
                f"not {len(tools)}; use a tokenizer with a chat template"
            )
        for tool in tools:
            if not inspect.signature(tool).parameters:
                raise RecipeError(
                    f"tool {tool.__name__!r} takes no argument, so it cannot be called in marks"
                )

    def parse(self, text: str, tools: Sequence[Tool]) -> ParsedCalls:
        """The marked text that ends the turn."""
        turn, closed, _ = text.partition(self.closing)
        head, opened, argument = turn.rpartition(self.opening)
        if not (closed and opened):
            return ParsedCalls((), turn.count(self.opening) + bool(closed))
        name = next(iter(inspect.signature(tools[0]).parameters))
        return ParsedCalls((ToolCall(tools[0].__name__, {name: argument}),), head.count(self.opening))

    def failure(self, message: str) -> str:
        """The third character, or the error in words."""
        return self.failed or f"error: {message}"


def tool_format(option: str | None, has_template: bool) -> ToolFormat:
    """The format of a generate node.

    Args:
        option: its `tool_format`: `hermes`, two or three characters, or None: `hermes`.
        has_template: whether the tokenizer has a chat template, through which tools are described.

    Raises:
        RecipeError: for an option that is neither, or a tokenizer that cannot offer tools so.
    """
    if option is not None and _are_marks(option):
        return Marked(*option)
    if option not in (None, "hermes"):
        raise RecipeError(
            f"tool_format is {option!r}; set it to 'hermes', or to two different characters such as '[]'"
        )
    if not has_template:
        raise RecipeError(
            "this tokenizer has no chat template to describe tools with; set the generate node's tool_format "
            "to the two characters that stand around a call, such as '[]'"
        )
    return Hermes()


def _are_marks(option: str) -> bool:
    """Whether these are two or three different characters, none of them a letter or digit."""
    return len(option) in (2, 3) and len(set(option)) == len(option) and not any(map(str.isalnum, option))


def _json_call(text: str, names: Sequence[str]) -> ToolCall | None:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or said.get("name") not in names:
        return None
    arguments = said.get("arguments", {})
    return ToolCall(said["name"], arguments) if isinstance(arguments, dict) else None
