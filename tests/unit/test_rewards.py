"""The library's rewards: known answers, wrong settings, and programs in a sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from hflow import Dataset, Json, Model, Recipe, Text, nodes, rewards, use
from hflow.base.errors import RecipeError
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph

data = Dataset("train", prompt=Text, answer=Text, schema=Json, tests=Json)
actor = Model("actor", trainable=True)


def checked(*listed: Any, columns: Dataset = data) -> Graph:
    """The graph of a generator and these nodes, after the checks that reading a recipe makes."""
    recipe = Recipe("test", columns, [use(nodes.actor_gen, actor, group=2), *listed])
    graph = build_graph(recipe.spec())
    recipe.check_bodies(graph)
    return graph


def test_exact_compares_without_surrounding_whitespace():
    assert [rewards.exact(" 42\n", "42"), rewards.exact("42.", "42"), rewards.exact("Yes", "yes")] == [
        1,
        0,
        0,
    ]
    assert rewards.exact("Yes", "yes", ignore_case=True) == 1.0


@pytest.mark.parametrize(
    ("completion", "options", "reward"),
    [
        ("5 steps\n#### 42", {}, 1.0),
        ("#### 41 no, #### 42", {}, 1.0),
        ("#### 41 no, #### 42", {"take": "first"}, 0.0),
        ("42", {}, 0.0),
        ("#### 41", {"compare": False}, 1.0),
        ("The answer is 42", {"pattern": r"(?<=IS )\d+$", "ignore_case": True}, 1.0),
    ],
)
def test_regex_compares_what_it_extracts(completion, options, reward):
    assert rewards.regex(completion, "42", **{"pattern": r"####\s*(\S+)", **options}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("5 * 8 = <<5*8=40>>40\n#### 40", "8 + 32 = 40.\n#### 40", 1.0),
        ("#### $1,000.00", "#### 1000", 1.0),
        ("#### 41, no:\n#### **-42** degrees.", "-42", 1.0),
        ("#### 40", "#### 400", 0.0),
        ("40", "#### 40", 0.0),
        ("#### forty, or 40", "#### 40", 0.0),
        ("#### 40/2", "#### 40", 0.0),
        ("#### 1,000/3", "#### 1", 0.0),
        ("#### 1e3", "1", 0.0),
        ("#### 1e3", "1000", 1.0),
        ("#### +5", "5", 1.0),
        ("#### \N{MINUS SIGN}5", "-5", 1.0),
        ("#### -$5.50", r"-\$5.5", 1.0),
        (r"#### \boxed{1{,}000}", "1000", 1.0),
        ("#### 3,5", "35", 0.0),
        ("#### 1,2,3", "1", 0.0),
        ("#### 1 000 \N{EURO SIGN}", "1000", 1.0),
        ("#### 10 apples", "10", 1.0),
        ("#### 5 * 3 = 15", "5", 0.0),
        ("#### 10-12", "10", 0.0),
        ("#### 7 or 8", "7", 0.0),
        ("#### 1.2.3", "1.2", 0.0),
        ("#### 0x10", "0", 0.0),
    ],
)
def test_final_number_compares_the_numbers_behind_the_last_marker(completion, answer, reward):
    assert rewards.final_number(completion, answer) == reward


def test_final_number_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match="'#### none' has no number behind '####'"):
        rewards.final_number("#### 1", "#### none")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$(x-1)(x+1)$", "x^2 - 1", 1.0),
        ("The total is 1,234 apples.", "1234", 1.0),
        (r"\boxed{3} and then 4", "3", 1.0),
        (r"\boxed{\{1, 2\}}", r"$\{2, 1\}$", 1.0),
        (r"\boxed{\frac{1}{3}}", r"\frac{1}{2}", 0.0),
        ("I do not know.", "7", 0.0),
        (r"\boxed{41}? No, \boxed{42}", "42", 1.0),
        (r"\boxed{41}? No, \boxed{42}", "41", 0.0),
        (r"\boxed{50\%}", "0.5", 1.0),
        (r"\boxed{50}\%", "0.5", 1.0),
        (r"so $50\%$.", "0.5", 1.0),
        ("0.5", r"50\%", 1.0),
        (r"\boxed{50\%}", "50", 1.0),
        (r"It costs \$18.90.", r"\$18.9", 1.0),
        (r"$\frac{1}{2^{99}}$", "1/2^99", 1.0),
        (r"$\frac{1}{2^{99}}$", "1/2^98", 0.0),
        ("0.0000001", "0.0000002", 0.0),
        ("0.333333", "1/3", 1.0),
        ("3.14159265", r"$\pi$", 1.0),
        (r"\boxed{1e3}", "1000", 1.0),
        ("so 1e3", "1", 0.0),
        ("x is +5", "5", 1.0),
        ("x is \N{MINUS SIGN}5", "-5", 1.0),
        ("10\N{EN DASH}20", "20", 1.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        (r"\boxed{1\,000}", "0", 0.0),
        (r"$1,\!000$", "1000", 1.0),
        (r"\boxed{0.5\%}", "0.5", 1.0),
        (r"\boxed{50\%}", r"0.5\%", 0.0),
        (r"\boxed{12\frac{1}{2}\%}", "0.125", 1.0),
        (r"so $12\frac{1}{2}\%$.", "12.5", 1.0),
        (r"$\boxed{25}$%", "1/4", 1.0),
        (r"5\% of 20 is \boxed{1}", "0.01", 0.0),
        (r"\boxed{1 000 000.5}", "1000000.5", 1.0),
        (r"so \fbox{42.}", "42", 1.0),
        ("\\boxed{\N{EURO SIGN}1,000}", "1000", 1.0),
        ("\\boxed{\uff081\uff0c2\uff09}", "(1, 2)", 1.0),  # full width
        ("\\boxed{1\N{VULGAR FRACTION ONE HALF}}", "1.5", 1.0),
        ("\\boxed{2\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE}}", "1/8", 1.0),
        ("\\boxed{3\N{SQUARE ROOT}2}", r"\sqrt{18}", 1.0),
        ("\\boxed{\N{MINUS SIGN}\N{INFINITY}}", r"-\infty", 1.0),
        ("\\boxed{-5 \N{DEGREE SIGN}C}", "-5", 1.0),
        (r"\boxed{\sin 30^\circ}", "1/2", 1.0),
        (r"\boxed{1000000.4}", "1000000", 0.0),
    ],
)
def test_math_compares_symbolically(completion, answer, reward):
    assert rewards.math(completion, answer) == reward


def test_math_can_ask_for_a_box():
    assert rewards.math("it is 3", "3", boxed=True) == 0.0
    assert rewards.math(r"\boxed{2} no, \boxed{\frac{6}{2}} or 4", "3", boxed=True) == 1.0


def test_math_refuses_an_answer_that_is_none():
    with pytest.raises(ValueError, match="holds no mathematics"):
        rewards.math("3", "$$")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"age": 7}', 1.0),
        ('Here:\n```json\n{"age": 7}\n```\nDone.', 1.0),
        ('{"age": "7"}', 0.0),
        ("age: 7", 0.0),
        ("[" * 100_000, 0.0),
        ('```python\nx = {}\n```\n~~~json\n{"age": 7}\n~~~\n', 1.0),
        ('{"age": 7, "height": NaN}', 0.0),
        ('Here: ```json {"age": 7}```', 1.0),
        ('1. ```json\n   {"age":\n   7}\n   ```. Done', 1.0),
    ],
)
def test_json_is_checked_against_its_schema(completion, reward):
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    assert rewards.json_schema(completion, schema) == reward
    assert rewards.json_schema(completion, shared_schema=json.dumps(schema)) == reward


def test_a_row_without_a_schema_is_refused():
    with pytest.raises(ValueError, match=r"not valid under any of the given schemas|is not of type"):
        rewards.json_schema("{}", {"type": "oject"})


@pytest.mark.parametrize(
    ("num_tokens", "punishment"),
    # DAPO, equation 13 with L_max = 20 and L_cache = 8: 0 up to 12 tokens, (12 - |y|) / 8 up to 20, then -1.
    [(1, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (20, -1.0), (30, -1.0)],
)
def test_overlong_punishes_softly(num_tokens, punishment):
    assert rewards.overlong(num_tokens, limit=20, buffer=8) == punishment


def test_brevity_prefers_short_right_completions():
    # Kimi k1.5, section 2.3.3: lambda = 0.5 - (len - 10) / 20 for lengths 10, 15, 20, 30.
    assert rewards.brevity([10, 15, 20, 30], [1.0, 0.0, 1.0, 0.0]) == [0.5, 0.0, 0.0, -0.5]
    assert rewards.brevity([10, 10], [1.0, 0.0]) == [0.0, 0.0]


def test_a_combination_is_a_weighted_sum_with_its_shares_as_metrics():
    reward = rewards.combine(exact=1.0, overlong=0.5)
    values = {"exact": 1.0, "overlong": -0.5, "exact_weight": 1.0, "overlong_weight": 0.5}
    assert reward(**values) == (0.75, {"exact": 1.0, "overlong": -0.25})
    node = checked(rewards.exact, use(rewards.overlong, limit=8, buffer=4), reward).node("reward")
    assert [(read.field, read.producer) for read in node.reads] == [
        ("exact", "exact"),
        ("overlong", "overlong"),
    ]
    assert {knob.name: knob.value for knob in node.spec.knobs} == {
        "exact_weight": 1.0,
        "overlong_weight": 0.5,
    }
    assert Path(node.spec.where.file).name == "test_rewards.py"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (lambda: [rewards.regex], "knob pattern is not set"),
        (lambda: [use(rewards.regex, pattern="(")], "no regular expression: .*Correct it"),
        (lambda: [use(rewards.overlong, limit=8)], "knobs limit and buffer must be set"),
        (lambda: [use(rewards.overlong, limit=8, buffer=9)], "from 1 to limit=8"),
        (lambda: [use(rewards.json_schema, shared_schema="{}")], "it needs one schema"),
        (
            lambda: [use(rewards.json_schema, shared_schema={"type": "object"})],
            "it must be str or None; pass JSON text, as json.dumps writes it",
        ),
        (
            lambda: [use(rewards.json_schema, reads={"schema": "nothing"}, shared_schema='{"type": 3}')],
            "no JSON schema",
        ),
        (lambda: [rewards.combine()], "combine.. has no rewards"),
        (lambda: [rewards.combine(exact="1")], "Set it to a number"),
        (lambda: [rewards.combine(exat=1.0), rewards.exact], "did you mean 'exact'"),
    ],
)
def test_wrong_settings_are_refused_when_the_recipe_is_read(listed, message):
    with pytest.raises(RecipeError, match=message):
        checked(*listed())


def test_an_answer_to_compare_with_must_exist():
    columns = Dataset("train", prompt=Text)
    with pytest.raises(RecipeError, match=r"no node and no column provides. Set compare=False"):
        checked(use(rewards.regex, pattern="x"), columns=columns)
    checked(use(rewards.regex, pattern="x", compare=False), columns=columns)


def test_a_missing_extra_is_named_when_the_recipe_is_read(monkeypatch):
    monkeypatch.setattr("hflow.dsl.bodies.find_spec", lambda package: None)
    with pytest.raises(RecipeError, match=r"math: it needs math_verify: pip install 'hflow-rl\[math\]'"):
        checked(rewards.math)


# Programs

ADD = "def add(a, b):\n    return a + b\n"
READS = "a, b = map(int, input().split())\nprint(a + b)  \n"


def program_reward(completion: str, *tests: dict[str, Any], **options: Any) -> float:
    return asyncio.run(rewards.code(completion, list(tests), **{"time_limit": 2.0, **options}))


ADDED: dict[str, Any] = {"call": "add", "args": [1, 2]}
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2", "output": "4"}]


@pytest.mark.parametrize(
    ("completion", "tests", "reward"),
    [
        (f"I add.\n```python\n{READS}```", SUMS, 1.0),
        ("import os\nos.write(1, b'%d' % sum(map(int, open(0).read().split())))", SUMS, 1.0),
        ("print(3)", SUMS, 0.0),
        ("print(3); import sys; sys.exit(0)", SUMS[:1], 1.0),
        ("print(3); import sys; sys.exit(1)", SUMS[:1], 0.0),
        (ADD, [{"call": "add", "args": [1, 2], "output": 3}], 1.0),
        (ADD, [{"call": "subtract", "args": [1, 2], "output": -1}], 0.0),
        (
            "class Solution:\n    def add(self, a, b): return a + b",
            [{"call": "Solution.add", "args": [1, 2], "output": 3}],
            1.0,
        ),
        (ADD, [{"test": "assert add(1, 2) == 3"}], 1.0),
        (ADD, [{"test": "assert add(1, 2) == 4"}], 0.0),
        ("import sys; sys.exit(0)", [{"test": "assert False"}], 0.0),
        ("import os; os._exit(0)", [{"test": "assert False"}], 0.0),
        ("while True: pass", SUMS[:1], 0.0),
        ("x = bytearray(2**30)\nprint(3)", SUMS[:1], 0.0),
        ("import socket; socket.socket()\nprint(3)", SUMS[:1], 0.0),
        ("no program", SUMS[:1], 0.0),
        (f"For\n```text\n1 2\n```\nI write\n```python3\n{READS}```\nwhich prints\n```\n3\n```", SUMS, 1.0),
        (f"1. Write\n   ```py\n{indent(READS, '   ')}   ```\n", SUMS, 1.0),
        (f"~~~~Python\n{READS}", SUMS, 1.0),
        (f"<answer>```python:a.py\n{READS}```</answer>\n```text\n3\n```\n```python\n```", SUMS, 1.0),
        (f"So: ```python\n{READS.strip()}```", SUMS, 1.0),
        ("def add(a: int, b: int): return add.__annotations__['a'] is int", [ADDED | {"output": True}], 1.0),
        ("def add(a, b): return True", [ADDED | {"output": 1}], 0.0),
        ("def add(a, b): return {'x': [1.0, 0]}", [ADDED | {"output": {"x": [1, False]}}], 0.0),
        ("def add(a, b): return 3.0", [ADDED | {"output": 3}], 1.0),
        (r"print('a\x0bb')", [{"input": "", "output": "a\nb"}], 0.0),
        ("print('a \\r\\nb')", [{"input": "", "output": "a\nb"}], 1.0),
        ("print(3)", [{"input": "", "output": "3", "call": None, "args": None, "test": None}], 1.0),
    ],
)
def test_programs_are_tested_in_the_sandbox(completion, tests, reward):
    options = {"time_limit": 0.3} if "while" in completion else {"memory_mb": 256}
    assert program_reward(completion, *tests, **options) == reward


def test_a_fraction_of_the_tests_can_count():
    assert program_reward("print(3)", *SUMS, score="fraction") == 0.5


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ({"input": "1"}, "must have one of these sets"),
        ({"stdin": "1", "output": "2"}, "must have one of these sets"),
        ({"input": "1", "output": 2}, "output of a test is 2. It must be text"),
        ({"input": ["1"], "output": "2"}, "input of a test is .* It must be text"),
        ({"call": "add", "args": "12", "output": 3}, "args of a test is '12'. It must be a list"),
        ({"call": "add(1, 2)", "args": [], "output": 3}, "It must be a function, or CLASS.METHOD"),
        ({"test": "assert add(1, 2) = 3"}, "a test is no Python"),
        ({"test": "# add(1, 2) is 3"}, "a test has no statement"),
        ("assert add(1, 2) == 3", "They must be a list of tests"),
    ],
)
def test_tests_of_another_form_refuse_the_sample(test, message):
    with pytest.raises(ValueError, match=message):
        program_reward("print(3)", test)


def test_a_row_without_tests_is_refused():
    with pytest.raises(ValueError, match="the row has no tests"):
        program_reward("print(3)")
