"""`Marked`: calls between two characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hflow.base.errors import RecipeError
from hflow.data.text.tool_formats.interface import ParsedCalls
from hflow.data.text.tool_formats.tools import Tool, accepts, parameter_names, tool_name
from hflow.data.text.turn_text import before_any
from hflow.types import ToolCall


@dataclass(frozen=True)
class Marked:
    """A call as text between two characters, such as `[12+34]`, for models with a small alphabet.

    The text is the first argument of the only tool. The second character ends the turn, and the tool's answer
    follows unchanged. A third character, if there is one, replaces the error of a tool that failed.
    """

    opening: str
    closing: str
    failed: str = ""
    server_parser: ClassVar[str | None] = None
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
        num_malformed = head.count(self.opening)
        if not accepts(tools[0], call.arguments):
            return ParsedCalls((), num_malformed + 1, text)
        return ParsedCalls((call,), num_malformed, head)

    def num_safe(self, text: str) -> int:
        """Return the length of what is in front of the first opening character."""
        return len(before_any(text, [self.opening]))

    def failure(self, message: str) -> str:
        """Return the third character, or the error."""
        return self.failed or f"error: {message}"

    def result_id(self, text: str, number: int) -> str | None:
        """Return None: results have no ids."""
        return None
