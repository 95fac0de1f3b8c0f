"""A reward for programs: they run in a sandbox, and their results are compared outside of it."""

from __future__ import annotations

import ast
import io
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hflow.dsl import checked_by, compute
from hflow.dsl.lazy import sandboxes
from hflow.rewards.fences import find_block
from hflow.types.sandbox import (
    LIMITS_OF_KNOBS,
    SANDBOX_PROVIDERS,
    Sandbox,
    ToolFailed,
    provider_problem,
)

LANGUAGES = ("python", "py")

_KEYS: Mapping[str, tuple[str, ...]] = {
    "input": ("output",),
    "call": ("output", "args"),
    "test": (),
}
"""The key that says how a test runs -> the other keys that it must have."""
_LIMITS = ("time_limit", "memory_mb", "without_landlock", "provider", "image")
"""Knobs of `code` that are limits of a test."""


def _limits(time_limit: float, memory_mb: int, without_landlock: bool, provider: str, image: str) -> Sandbox:
    return Sandbox(time_limit, memory_mb, without_landlock=without_landlock, provider=provider, image=image)


def _problem(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return provider_problem(knobs["provider"])


@compute(per="sample")
@checked_by(_problem)
async def code(
    completion: str,
    tests: list[dict[str, Any]],
    *,
    score: Literal["all", "fraction"] = "all",
    time_limit: float = 5.0,
    memory_mb: int = 512,
    without_landlock: bool = False,
    provider: str = SANDBOX_PROVIDERS.default,
    image: str = "",
) -> float:
    r"""Return whether a Python program passes the tests of its row, or which fraction of them.

    A test is one of

    - `{"input": "1 2\n", "output": "3\n"}`: the program reads standard input and writes standard output.
      Whitespace at the ends of lines and of the output does not count.
    - `{"call": "add", "args": [1, 2], "output": 3}`: a function, or `"Solution.add"` for a method, is called
      and returns the output, a JSON value. `true` and 1 differ.
    - `{"test": "assert add(1, 2) == 3"}`: statements that run after the program, and raise if it is wrong.

    Every test runs in a process of its own, which `@sandbox` describes. The outputs that are expected stay
    outside of it. Statements of a `test` do not: a program that looks for them can cheat.

    A program that raises, ends without a result, or exceeds a limit fails the test. A sandbox that
    cannot be made, a machine that is the reason of a failure, and tests of another form refuse the sample.

    Args:
        completion: what the model wrote. The program is its last block of Python between fences
            (`find_block`), or all of it if it has no block.
        tests: the tests of the row, a `Json` column.
        score: 1 if `all` tests pass, otherwise 0; or the `fraction` that pass.
        time_limit: seconds of one test, without those in which it waits for a processor.
        memory_mb: MiB of address space of one test.
        without_landlock: run also where the kernel cannot protect files, instead of refusing.
        provider: what runs the tests, as in `@sandbox`. Others than `process` start a container or a machine
            for every test.
        image: the image of a test's container or machine. Default: the provider's own.
    """
    if not tests:
        raise ValueError("the row has no tests")
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise ValueError(f"tests of the row are {tests!r:.80}. They must be a list of tests")
    checked = [_checked(test) for test in tests]
    program = find_block(completion, LANGUAGES)
    limits = _limits(time_limit, memory_mb, without_landlock, provider, image)
    num_passed = 0
    for test in checked:
        passed = await _passes(program, test, limits)
        if score == "all" and not passed:
            return 0.0
        num_passed += passed
    return num_passed / len(checked)


setattr(code, LIMITS_OF_KNOBS, lambda knobs: _limits(**{name: knobs[name] for name in _LIMITS}))


def _checked(test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a test, without padding, if it has a known form.

    Raises:
        ValueError: if not.
    """
    # Parquet gives all tests of a column the same keys, and null to those that a test does not have.
    is_padding = {key: value is None for key, value in test.items()}
    is_padding["output"] = test.get("output") is None and test.get("call") is None
    test = {key: value for key, value in test.items() if not is_padding[key]}
    kind = next((key for key in _KEYS if key in test), None)
    expected = () if kind is None else (kind, *_KEYS[kind])
    if set(test) != set(expected):
        forms = "; ".join(", ".join((key, *others)) for key, others in _KEYS.items())
        raise ValueError(
            f"a test has the keys {', '.join(test) or 'none'}. It must have one of these sets: {forms}"
        )
    for key in ("input", "call", "test", *(("output",) if "input" in test else ())):
        if key in test and not isinstance(test[key], str):
            raise ValueError(f"{key} of a test is {test[key]!r:.80}. It must be text")
    if not isinstance(test.get("args", []), list):
        raise ValueError(f"args of a test is {test['args']!r:.80}. It must be a list")
    if "input" in test:
        test["input"].encode()  # half of a surrogate pair cannot be written
    if "call" in test and not all(name.isidentifier() for name in test["call"].split(".", 1)):
        raise ValueError(f"a test calls {test['call']!r:.80}. It must be a function, or CLASS.METHOD")
    if "test" in test and not _statements(test["test"]):
        raise ValueError("a test has no statement, so every program would pass it")
    return test


def _statements(text: str) -> list[ast.stmt]:
    """Return the statements of a test.

    Raises:
        ValueError: if it is no Python.
    """
    try:
        return ast.parse(text).body
    except SyntaxError as error:
        raise ValueError(f"a test is no Python: {error}") from None


async def _passes(program: str, test: Mapping[str, Any], limits: Sandbox) -> bool:
    given = {key: value for key, value in test.items() if key != "output"}
    try:
        result = await sandboxes.sandboxes_of_process().run(
            run_program, limits, {"program": program, "test": given}
        )
    except (ToolFailed, TypeError):  # it raised, exceeded a limit, or returned what is not JSON
        return False
    if "input" in test:
        return isinstance(result, str) and _lines(result) == _lines(test["output"])
    return True if "test" in test else _is_same(result, test["output"])


def _lines(text: str) -> Sequence[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_same(one: Any, two: Any) -> bool:
    """Return whether JSON values are the same; in Python, True equals 1."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_is_same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_is_same(one[key], two[key]) for key in one)
    return isinstance(one, bool) == isinstance(two, bool) and bool(one == two)


def run_program(program: str, test: dict[str, Any]) -> Any:
    """Run a program in a process made for it, and return what the test asks for.

    Standard input and output are files of the working directory, for programs that use file descriptors.

    Returns:
        The text that it wrote, or the value of the call; None for statements.
    """
    Path("stdin").write_text(test.get("input", ""), encoding="utf-8")
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT), 1)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    sys.argv = ["program.py"]
    names: dict[str, Any] = {"__name__": "__main__" if "input" in test else "program"}
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    except SystemExit as end:
        if "input" not in test or end.code not in (None, 0):
            raise
    if "call" in test:
        owner, _, method = test["call"].rpartition(".")
        function = getattr(names[owner](), method) if owner else names[method]
        return function(*test["args"])
    if "test" in test:
        exec(compile(test["test"], "test.py", "exec", dont_inherit=True), names)
        return None
    sys.stdout.flush()
    return Path("stdout").read_text(encoding="utf-8")
