"""Rewards that compare an answer: as text, by a pattern, or as mathematics."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from itertools import product
from typing import Any, Literal

from hflow.dsl import checked_by, compute, missing_extra

_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")
"""What shows that a text says itself where its LaTeX is."""
_NUMBER = re.compile(r"[\s*]*(-?)\$?(\d[\d,]*+(?:\.\d++)?+|\.\d++)(?!\s*[\d/:^])")
"""A number with its sign, perhaps in bold or with a dollar sign. Part of a fraction or a time is none."""


@compute(per="sample")
def exact(completion: str, answer: str, *, ignore_case: bool = False) -> float:
    """Return 1 if the completion is the answer, otherwise 0. Whitespace around them does not count.

    Args:
        completion: what the model wrote.
        answer: the right answer.
        ignore_case: whether upper and lower case are the same.
    """
    return float(_normal(completion, ignore_case) == _normal(answer, ignore_case))


def _check_pattern(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    pattern = knobs["pattern"]
    if pattern is None:
        return r"knob pattern is not set. Set it, as in pattern=r'####\s*(\S+)'"
    try:
        re.compile(pattern)
    except re.error as error:
        return f"knob pattern is {pattern!r}, which is no regular expression: {error}. Correct it"
    if knobs["compare"] and "answer" not in reads:
        return (
            "it compares with the field 'answer', which no node and no column provides. Set compare=False, "
            "or reads={'answer': FIELD}"
        )
    return None


@compute(per="sample", timeout=10.0)
@checked_by(_check_pattern)
def regex(
    completion: str,
    answer: str | None = None,
    *,
    pattern: str | None = None,
    take: Literal["first", "last"] = "last",
    compare: bool = True,
    ignore_case: bool = False,
) -> float:
    r"""Return 1 if what a pattern finds in the completion is the answer, otherwise 0.

    Args:
        completion: what the model wrote.
        answer: the right answer; not needed with `compare=False`.
        pattern: a regular expression, such as `####\s*(\S+)`. Its first group is compared, or the whole match
            if it has none. It must be set.
        take: the match that counts if there are several.
        compare: False: any match gives 1, which rewards a format.
        ignore_case: whether upper and lower case are the same, for the pattern and the comparison.
    """
    assert pattern is not None, "checked when the recipe was read"
    found = list(re.finditer(pattern, completion, re.IGNORECASE if ignore_case else 0))
    if not found or not compare:
        return float(bool(found))
    assert answer is not None, "checked when the recipe was read"
    match = found[0 if take == "first" else -1]
    extracted = match.group(1) if match.re.groups else match.group()
    return float(_normal(extracted or "", ignore_case) == _normal(answer, ignore_case))


def _check_marker(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return None if knobs["marker"] else "knob marker is empty. Set it to the text in front of the number"


@compute(per="sample", timeout=10.0)
@checked_by(_check_marker)
def final_number(completion: str, answer: str, *, marker: str = "####") -> float:
    """Return 1 if the number behind the completion's last marker equals that of the answer, otherwise 0.

    `1,000`, `$1000` and `1000.00` are equal. A completion without the marker, or with something else behind
    it, gets 0. An answer without a number refuses the sample.

    Args:
        completion: what the model wrote.
        answer: the right number, or a solution that ends with the marker and the number, as in GSM8K.
        marker: the text in front of the number.
    """
    expected = _number(answer.rpartition(marker)[2])
    if expected is None:
        raise ValueError(f"the answer {answer!r:.80} has no number behind {marker!r}")
    _, found, end = completion.rpartition(marker)
    return float(bool(found) and _number(end) == expected)


def _number(text: str) -> Decimal | None:
    """Return the number with which a text begins, None if it begins with something else."""
    match = _NUMBER.match(text)
    return None if match is None else Decimal(match.group(1) + match.group(2).replace(",", ""))


def _needs_math_verify(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return missing_extra("math", "math_verify")


@compute(per="sample", timeout=30.0)
@checked_by(_needs_math_verify)
def math(completion: str, answer: str, *, boxed: bool = False) -> float:
    r"""Return 1 if the completion's result equals the answer as mathematics, otherwise 0.

    `\frac{1}{2}`, `0.5` and `50\%` are equal, and so are `x^2 - 1` and `(x - 1)(x + 1)`. A completion without
    a result gets 0. An answer without one, and a comparison that fails, refuse the sample.

    Args:
        completion: what the model wrote. Its result is the last `\boxed{...}`, or else the last formula or
            number.
        answer: the right result, in LaTeX with or without `$`, or a number.
        boxed: only `\boxed{...}` counts as a result.

    Source: the `math-verify` library, whose own time limits are off: they would score 0. The node's `timeout`
    takes their place.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    right = _parse(math_verify, answer if any(d in answer for d in _DELIMITERS) else f"\\boxed{{{answer}}}")
    if not right:
        raise ValueError(f"the answer {answer!r:.80} holds no mathematics")
    text = _last_boxed(completion) if boxed else completion
    written = [] if text is None else _parse(math_verify, text)
    failure: Exception | None = None
    for expected, result in product(right, written):
        try:
            if math_verify.verify(expected, result, timeout_seconds=None, raise_on_error=True):
                return 1.0
        except Exception as error:  # noqa: BLE001 - sympy may raise anything; another form may be equal
            failure = error
    if failure is not None:
        raise failure
    return 0.0


def _parse(math_verify: Any, text: str) -> list[Any]:
    parsed: list[Any] = math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    return parsed


def _last_boxed(text: str) -> str | None:
    r"""Return the last `\boxed{...}` of a text, with braces that balance; None if there is none."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start, len(text)) if start >= 0 else ():
        depth += (text[i] == "{") - (text[i] == "}")
        if text[i] == "}" and depth == 0:
            return text[start : i + 1]
    return None


def _normal(text: str, ignore_case: bool) -> str:
    stripped = text.strip()
    return stripped.casefold() if ignore_case else stripped
