"""Formats of tool calls, and descriptions of tools."""
# ruff: noqa: RUF001 - the tokens of DeepSeek

from __future__ import annotations

import pytest

from hflow.base.errors import RecipeError
from hflow.data.text.tool_formats.hermes import Hermes
from hflow.data.text.tool_formats.interface import ParsedCalls
from hflow.data.text.tool_formats.marked import Marked
from hflow.data.text.tool_formats.registry import FORMATS, tool_format
from hflow.data.text.tool_formats.tools import tool_schema
from hflow.data.text.turn_text import TurnText
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
    assert tool_format("[]?", None).failure("no") == "?"


def test_the_option_selects_the_format() -> None:
    assert isinstance(tool_format(None, "{{ messages }}"), Hermes)
    assert tool_format("<>", "{{ messages }}") == Marked("<", ">")
    assert tool_format("<>", None).stop == (">",)
    assert isinstance(tool_format("mistral", "<tool_call>"), FORMATS["mistral"])
    with pytest.raises(RecipeError, match=r"no chat template .* tool_format"):
        tool_format("hermes", None)
    for wrong in ("xml", "[[", "["):
        with pytest.raises(RecipeError, match="tool_format is"):
            tool_format(wrong, "{{ messages }}")


TEMPLATES = [
    # Qwen2.5 and Qwen3
    (
        "hermes",
        "For each function call, return a json object within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\n</tool_call><|im_end|>',
    ),
    # Llama 3.1 and 3.2
    (
        "llama3_json",
        """{{- '<|start_header_id|>assistant<|end_header_id|>' -}}{{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}""",
    ),
    # Mistral 7B 0.3
    ("mistral", """{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}"""),
    # DeepSeek V3 and R1
    (
        "deepseek_v3",
        "{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + "
        "tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + "
        "'```' + '<｜tool▁call▁end｜>'}}",
    ),
    # DeepSeek V3.1
    (
        "deepseek_v31",
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + "
        "tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}",
    ),
    # GLM 4.5
    (
        "glm",
        "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
        "...\n</tool_call>",
    ),
    # Qwen3-Coder
    (
        "qwen3_coder",
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n"
        "</parameter>\\n</function>\\n</tool_call>",
    ),
    # an older template that describes no tools
    ("hermes", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"),
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_the_chat_template_selects_the_format(name: str, template: str) -> None:
    assert type(tool_format(None, template)) is FORMATS[name]


def test_a_template_of_an_unknown_format_needs_the_option() -> None:
    for template, why in (
        ("<tool_call>\n<function=example_function_name>{...}</function>", "is not known"),
        ("{{ '<|python_start|>' }}", "is not known"),
        ("[TOOL_CALLS] or <tool_call>", "may be hermes or mistral"),
    ):
        with pytest.raises(RecipeError, match=f"tool calls in the chat template {why}; set .* tool_format"):
            tool_format(None, template)


ADD = ToolCall("add", {"a": 1, "b": 2})
FIND = ToolCall("search", {"query": "x; {y}", "kinds": ["a", "b"]})
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
A, F = '{"a": 1, "b": 2}', '{"query": "x; {y}", "kinds": ["a", "b"]}'
PAIRS = "<arg_key>{}</arg_key>{}<arg_value>{}</arg_value>{}"


def glm(name: str, line: str, **values: str) -> str:
    pairs = "".join(PAIRS.format(key, line, value, line) for key, value in values.items())
    return f"<tool_call>{name}{line}{pairs}</tool_call>"


def qwen_coder(name: str, line: str, **values: str) -> str:
    pairs = "".join(
        f"<parameter={key}>{line}{value}{line}</parameter>{line}" for key, value in values.items()
    )
    return f"<tool_call>{line}<function={name}>{line}{pairs}</function>{line}</tool_call>"


def deepseek(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


TURNS: list[tuple[str, str, list[ToolCall], int, str]] = [
    ("llama3_json", f'{{"name": "add", "parameters": {A}}}', [ADD], 0, ""),
    ("llama3_json", f'<|python_tag|>{{"name": "search", "parameters": {F}}}', [FIND], 0, ""),
    (
        "llama3_json",
        f'{{"name": "add", "parameters": {A}}}; {{"name": "search", "parameters": {F}}}',
        [ADD, FIND],
        0,
        "",
    ),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1', [], 1, ""),
    ("llama3_json", f'{{"name": "sub", "parameters": {A}}}', [], 1, ""),
    ("llama3_json", f'{{"name": "add", "parameters": {A}}} and more', [ADD], 1, ""),
    ("llama3_json", '{"answer": 3}', [], 0, ""),
    ("llama3_json", f'The call is {{"name": "add", "parameters": {A}}}', [], 0, ""),
    ("pythonic", "[add(a=1, b=2)]", [ADD], 0, ""),
    ("pythonic", "[add(a=1, b=2), search(query='x; {y}', kinds=[\"a\", 'b'])]", [ADD, FIND], 0, ""),
    ("pythonic", "<|python_start|>[add(a=1, b=2)]<|python_end|>", [ADD], 0, ""),
    ("pythonic", "[add(a=-1, b=null)]", [ToolCall("add", {"a": -1, "b": None})], 0, ""),
    ("pythonic", "[add(1, 2)]", [], 1, ""),
    ("pythonic", "[add(a=open('x'), b=2)]", [], 1, ""),
    ("pythonic", "[add(a=1, b=1e999)]", [], 1, ""),
    ("pythonic", "[add(a={1, 2}, b=2)]", [], 1, ""),
    ("pythonic", "[add(**{'a': 1})]", [], 1, ""),
    ("pythonic", "[add(a=1, sub(b=2)]", [], 1, ""),
    ("pythonic", "[add(a=" + "[" * 10_000, [], 1, ""),
    ("pythonic", "[1, 2]", [], 0, ""),
    ("mistral", f'[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}]', [ADD], 0, ""),
    (
        "mistral",
        f'So.[TOOL_CALLS][{{"name": "add", "arguments": {A}, "id": "abcdef123"}}, '
        f'{{"name": "search", "arguments": {F}}}]',
        [ADD, FIND],
        0,
        "So.",
    ),
    ("mistral", f"So. [TOOL_CALLS]add[ARGS]{A}[TOOL_CALLS]search[ARGS]{F}", [ADD, FIND], 0, "So."),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{A}", [ADD], 0, ""),
    ("mistral", f"[TOOL_CALLS]add{A}", [ADD], 0, ""),
    ("mistral", f"[TOOL_CALLS]sub[ARGS]{A}[TOOL_CALLS]add[ARGS]{A}", [ADD], 1, ""),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a"', [], 1, ""),
    ("mistral", "[TOOL_CALLS]", [], 1, ""),
    ("deepseek_v3", "Hm.\n" + deepseek(V3.format("add", A), V3.format("search", F)), [ADD, FIND], 0, "Hm."),
    ("deepseek_v3", deepseek(V3.format("add", "{")), [], 1, ""),
    ("deepseek_v3", deepseek(V31.format("add", A)), [], 1, ""),
    ("deepseek_v3", deepseek(V3.format("add", A))[:-30], [], 1, ""),
    ("deepseek_v31", "Hm." + deepseek(V31.format("add", A), V31.format("search", F)), [ADD, FIND], 0, "Hm."),
    ("deepseek_v31", deepseek(V31.format("sub", A), V31.format("add", A)), [ADD], 1, ""),
    ("deepseek_v31", deepseek(), [], 1, ""),
    ("glm", "Hm.\n" + glm("add", "\n", a="1", b="2"), [ADD], 0, "Hm."),
    (
        "glm",
        glm("add", "", a="1", b="2") + glm("search", "", query="x; {y}", kinds='["a", "b"]'),
        [ADD, FIND],
        0,
        "",
    ),
    ("glm", glm("search", "\n", query="12"), [ToolCall("search", {"query": "12"})], 0, ""),
    ("glm", glm("search", "\n", kinds="a b"), [ToolCall("search", {"kinds": "a b"})], 0, ""),
    ("glm", glm("sub", "\n", a="1"), [], 1, ""),
    ("glm", glm("add", "\n", a="1")[:-5], [], 1, ""),
    ("glm", f'<tool_call>{{"name": "add", "arguments": {A}}}</tool_call>', [], 1, ""),
    ("qwen3_coder", "Hm.\n" + qwen_coder("add", "\n", a="1", b="2"), [ADD], 0, "Hm."),
    (
        "qwen3_coder",
        qwen_coder("add", "", a="1", b="2") + qwen_coder("search", "\n", query="x; {y}", kinds='["a", "b"]'),
        [ADD, FIND],
        0,
        "",
    ),
    (
        "qwen3_coder",
        qwen_coder("search", "\n", query="two\n\nlines\n"),
        [ToolCall("search", {"query": "two\n\nlines\n"})],
        0,
        "",
    ),
    ("qwen3_coder", qwen_coder("search", "\n", query="12"), [ToolCall("search", {"query": "12"})], 0, ""),
    ("qwen3_coder", qwen_coder("sub", "\n", a="1"), [], 1, ""),
    ("qwen3_coder", qwen_coder("add", "\n", a="1")[:-5], [], 1, ""),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</tool_call>", [], 1, ""),
    ("qwen3_coder", f'<tool_call>{{"name": "add", "arguments": {A}}}</tool_call>', [], 1, ""),
    *[(name, "no call at all", [], 0, "") for name in FORMATS],
]


@pytest.mark.parametrize(("name", "text", "calls", "num_malformed", "head"), TURNS)
def test_calls_of_published_formats(
    name: str, text: str, calls: list[ToolCall], num_malformed: int, head: str
) -> None:
    wanted = ParsedCalls(tuple(calls), num_malformed, head if calls else text)
    for tools in ([add, search], [tool_schema(add), tool_schema(search)]):
        assert FORMATS[name]().parse(text, tools) == wanted


def reply_text(name: str, text: str) -> str:
    return FORMATS[name]().parse(text, [add, search]).text


@pytest.mark.parametrize(
    ("name", "text"),
    [(name, text) for name, text, *_ in TURNS if len(text) < 500]
    + [("hermes", f"Let me see.  {call(ONE)}"), ("hermes", "a <tool_ b"), ("mistral", "[TOOL] x [")],
)
@pytest.mark.parametrize("num_characters", [1, 3])
def test_a_stream_never_sends_a_call(name: str, text: str, num_characters: int) -> None:
    turn = TurnText(lambda ids: "".join(map(chr, ids)), [], FORMATS[name]().num_safe)
    ids = [ord(character) for character in text]
    sent = "".join(turn.add(ids[i : i + num_characters]) for i in range(0, len(ids), num_characters))
    assert reply_text(name, text).startswith(sent)
    if not FORMATS[name]().parse(text, [add, search]).calls and "no call" in text:
        assert sent == text


def test_a_stream_holds_back_stop_strings_and_halves_of_characters() -> None:
    turn = TurnText(lambda ids: bytes(ids).decode(errors="replace"), ["END", "N!"])
    parts = [turn.add([byte]) for byte in "aéENxN!b".encode()]
    assert parts == ["a", "", "é", "", "", "ENx", "", "", ""]


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


@pytest.mark.parametrize("name", ["hermes", "[]"])
def test_a_strict_tool_is_called_with_what_its_schema_accepts_only(name: str) -> None:
    def parsed(number: str, *, is_strict: bool) -> ParsedCalls:
        properties = {"a": {"enum": ["1", "2"]}}
        parameters = {"type": "object", "properties": properties, "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": is_strict}}
        block = call(f'{{"name": "f", "arguments": {{"a": "{number}"}}}}')
        return tool_format(name, None if name == "[]" else "x").parse(
            f"[{number}]" if name == "[]" else block, [tool]
        )

    right = parsed("1", is_strict=True)
    assert (right.calls, right.num_malformed) == ((ToolCall("f", {"a": "1"}),), 0)
    wrong = parsed("3", is_strict=True)
    assert (wrong.calls, wrong.num_malformed) == ((), 1)
    assert parsed("3", is_strict=False).calls == (ToolCall("f", {"a": "3"}),)
