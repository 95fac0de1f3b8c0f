"""Formats of tool calls, and descriptions of tools."""

from __future__ import annotations

import pytest

from hflow.base.errors import RecipeError
from hflow.data.text.tool_formats import Hermes, Marked, ParsedCalls, tool_format, tool_schema
from hflow.types import ToolCall


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def search(query: str, kinds: list[str], limit: int = 5) -> list[str]:
    """Look something up."""
    return [query] * limit


def bare(x) -> str:  # type: ignore[no-untyped-def]
    return str(x)


def odd(x: complex) -> str:
    return str(x)


def nullary() -> str:
    return ""


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


ONE = '\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n'


@pytest.mark.parametrize(
    ("text", "calls", "num_malformed"),
    [
        ("no call at all", [], 0),
        (f"Let me see. {call(ONE)}", [ToolCall("add", {"a": 1, "b": 2})], 0),
        (
            call(ONE) + call('{"name": "search"}'),
            [ToolCall("add", {"a": 1, "b": 2}), ToolCall("search", {})],
            0,
        ),
        (call('{"name": "add", "arguments": {"a": 1'), [], 1),
        (call('["add"]') + call(ONE), [ToolCall("add", {"a": 1, "b": 2})], 1),
        (call('{"name": "sub", "arguments": {}}'), [], 1),
        (call('{"name": ["add"], "arguments": {}}'), [], 1),
        (call('{"name": "add", "arguments": "1, 2"}'), [], 1),
        (call('{"name": "add", "arguments": {"a": NaN}}'), [], 1),
        (call('{"name": "add", "arguments": {"a": "\\ud800"}}'), [], 1),
        (call("[" * 100_000), [], 1),
        ("<tool_call>" + ONE, [], 1),
    ],
)
def test_hermes_blocks(text: str, calls: list[ToolCall], num_malformed: int) -> None:
    head = text.partition("<tool_call>")[0].rstrip() if calls else text
    assert Hermes().parse(text, [add, search]) == ParsedCalls(tuple(calls), num_malformed, head)
    schemas = [tool_schema(add), tool_schema(search)]
    assert Hermes().parse(text, schemas) == Hermes().parse(text, [add, search])


@pytest.mark.parametrize(
    ("text", "argument", "head", "num_malformed"),
    [
        ("046", None, "046", 0),
        ("[12+34]", "12+34", "", 0),
        ("1[12[34]", "34", "1[12", 1),
        ("[12+34]5", "12+34", "", 0),
        ("[12+34", None, "[12+34", 1),
        ("12+34]", None, "12+34]", 1),
        ("[]", "", "", 0),
    ],
)
def test_marked_calls(text: str, argument: str | None, head: str, num_malformed: int) -> None:
    calls = () if argument is None else (ToolCall("search", {"query": argument}),)
    for tool in (search, tool_schema(search)):
        assert Marked("[", "]").parse(text, [tool]) == ParsedCalls(calls, num_malformed, head)


def test_the_answer_of_a_failed_tool() -> None:
    assert Hermes().failure("no") == Marked("[", "]").failure("no") == "error: no"
    assert tool_format("[]?", has_template=False).failure("no") == "?"


def test_the_option_selects_the_format() -> None:
    assert isinstance(tool_format(None, has_template=True), Hermes)
    assert tool_format("<>", has_template=True) == Marked("<", ">")
    assert tool_format("<>", has_template=False).stop == (">",)
    with pytest.raises(RecipeError, match=r"no chat template .* tool_format"):
        tool_format("hermes", has_template=False)
    for wrong in ("xml", "[[", "["):
        with pytest.raises(RecipeError, match="tool_format is"):
            tool_format(wrong, has_template=True)


def test_indistinguishable_tools_are_rejected() -> None:
    with pytest.raises(RecipeError, match="two tools are named 'add'"):
        Hermes().check([add, search, add])
    with pytest.raises(RecipeError, match="offers one tool, not 2"):
        Marked("[", "]").check([add, search])
    with pytest.raises(RecipeError, match="'nullary' takes no argument"):
        Marked("[", "]").check([nullary])
    with pytest.raises(RecipeError, match="'nullary' takes no argument"):
        Marked("[", "]").check([{"type": "function", "function": {"name": "nullary"}}])


def test_a_docstring_describes_tool_and_parameters() -> None:
    function = tool_schema(add)["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["properties"]["b"] == {"type": "integer", "description": "the second."}


def test_without_documented_arguments_the_signature_describes_them() -> None:
    function = tool_schema(search)["function"]
    assert function["description"] == "Look something up."
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "kinds": {"type": "array", "items": {"type": "string"}},
            "limit": {"type": "integer"},
        },
        "required": ["query", "kinds"],
    }


def test_tools_that_cannot_be_described_are_rejected() -> None:
    with pytest.raises(RecipeError, match=r"tool 'bare' .* annotate 'x'"):
        tool_schema(bare)
    with pytest.raises(RecipeError, match=r"tool 'odd' .* 'x' is <class 'complex'>"):
        tool_schema(odd)
