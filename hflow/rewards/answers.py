"""Rewards that compare an answer: as text, by a pattern, or as mathematics."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any, Literal

from hflow.dsl import checked_by, compute, missing_extra

_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
"""What shows that a text says itself where its LaTeX is. `\\$` is a dollar sign."""
_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})++(?!\d)(?:\.\d++)?+|\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d{1,3}+)?+"
_NUMBER = re.compile(
    rf"(?:[\s*]|\\\(|\\boxed\{{)*+([+-]?)\s*\$?([+-]?)({_DIGITS})"
    r"(?!\s*[\d/:^]|[_.]\d|\s*(?:[-+*=,x\u00d7]|(?:to|or|and)\b)\s*\$?[+-]?\d)"
)
"""A number with its sign, perhaps in bold, in a box or with a dollar sign. Part of a fraction, a time, a sum,
a range or a list is none."""
_SPACED_NUMBER = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SIGNS = {
    **{code + 0xFEE0: code for code in range(0x21, 0x7F)},  # full-width signs, as in Chinese texts
    **dict.fromkeys(map(ord, "\u20ac\u00a3\u00a5"), r"\$"),  # euro, pound, yen
    0x2212: "-",  # a minus sign
    0x221E: r"\infty ",
    0xB0: r"^\circ ",
}
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b"
_SPELLINGS = (
    (re.compile("(?<=\\d)\\u2013(?=\\d)"), " to "),  # an en dash in a range
    (re.compile("\\u2013(?=[\\d.])"), "-"),  # an en dash in place of a minus sign
    (re.compile(r"\\fbox(?=\s*\{)"), r"\\boxed"),
    (re.compile(r"\\text\{\s*\\?\$\s*\}|\\\$|(?<=\{)\$(?=[\d.,]+\})"), ""),  # money
    (re.compile(r"\\%"), "%"),
    (re.compile(r"(\^\\circ)\s*[CF]\b"), r"\1"),
    (re.compile(r"%\s*(\$|\\\)|\\\])"), r"\1%"),
    (  # between thousands
        re.compile("(?<=\\d)(?:,\\\\!|\\{,\\}|\\\\[,!;: ]|[\\u00a0\\u2009\\u202f])(?=\\d{3}(?!\\d))"),
        "",
    ),
    (re.compile(r"(?<![\w)\]}.+])\+(?=[\d.])"), ""),  # a sign, not a sum
    (
        re.compile(r"(?<![\w.])((?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,2})(?![\w.])"),
        lambda match: f"{Decimal(match.group(1)):f}",
    ),
    (re.compile("[\\u00bc-\\u00be\\u2150-\\u215e]"), lambda match: _fraction(match.group())),
    (
        re.compile(f"[{_SUPERSCRIPTS}]+"),
        lambda match: f"^{{{unicodedata.normalize('NFKC', match.group()).translate(_SIGNS)}}}",
    ),
    (re.compile("\\u221a\\s*(?:\\(([^()]*)\\)|(\\d+|\\w))"), r"\\sqrt{\1\2}"),
    (
        re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc)\s*[({]?\s*)(\d+(?:\.\d*)?)\s*\^(?:\\circ|\{\\circ\})"),
        r"\1\\frac{\2\\pi}{180}",
    ),
)
"""Ways to write a number that `math-verify` reads as another, and what it reads as meant."""
MAX_DIFFERENCE = 1e-5
"""By which share a decimal fraction may differ from the number that it is rounded from."""


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

    `1,000`, `1 000`, `$1000`, `1000.00`, `+1000` and `1e3` are equal. A completion without the marker, or
    with something else behind it, gets 0. An answer without a number refuses the sample.

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
    match = _NUMBER.match(_readable(text))
    if match is None or (match.group(1) and match.group(2)):
        return None
    return Decimal(match.group(1) + match.group(2) + re.sub("[, ]", "", match.group(3)))


def _needs_math_verify(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return missing_extra("math", "math_verify")


@compute(per="sample", timeout=30.0)
@checked_by(_needs_math_verify)
def math(completion: str, answer: str, *, boxed: bool = False) -> float:
    r"""Return 1 if the completion's result equals the answer as mathematics, otherwise 0.

    `\frac{1}{2}`, `0.5` and `50\%` are equal, and so are `x^2 - 1` and `(x - 1)(x + 1)`. A percentage also
    equals the number before its sign. Fractions of whole numbers must be equal; a decimal fraction must be
    right to six decimals, and within 0.00001 of its value. Units do not count. A completion without a result
    gets 0. An answer without one, and a comparison that fails, refuse the sample.

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
    right = _parse(math_verify, answer if _DELIMITED.search(answer) else f"\\boxed{{{answer}}}")
    if not right.forms:
        raise ValueError(f"the answer {answer!r:.80} holds no mathematics")
    has_result = not boxed or "\\boxed{" in _readable(completion)
    written = _parse(math_verify, completion) if has_result else _Result([])
    if right.is_percentage != written.is_percentage:
        right, written = right.with_share(), written.with_share()
    failure: Exception | None = None
    for expected, result in product(right.forms, written.forms):
        try:
            is_equal = math_verify.verify(expected, result, timeout_seconds=None, raise_on_error=True)
            if is_equal and _is_as_exact(expected, result):
                return 1.0
        except Exception as error:  # noqa: BLE001 - sympy may raise anything; another form may be equal
            failure = error
    if failure is not None:
        raise failure
    return 0.0


@dataclass(frozen=True)
class _Result:
    """What a text says."""

    forms: list[Any]
    """Expressions of sympy, and texts that are none. One that is equal is enough."""
    is_percentage: bool = False
    """Whether a percent sign follows, which the forms leave out."""

    def with_share(self) -> _Result:
        """Return a percentage as the share of 1 too, any other result as it is."""
        import sympy

        if not self.is_percentage:
            return self
        return _Result([*self.forms, *(form / 100 for form in self.forms if isinstance(form, sympy.Expr))])


def _parse(math_verify: Any, text: str) -> _Result:
    """Return the last box of a text or, without one, its last formula or number."""
    import sympy

    text = _readable(text)
    box = _last_boxed(text)
    is_percentage = False
    if box is not None:
        inner = box.removeprefix("\\boxed{").removesuffix("}").strip().removesuffix(".")
        is_percentage = "%" in (inner[-1:], text[text.rfind(box) + len(box) :].lstrip(" $")[:1])
        inner = inner.removesuffix("%").rstrip()
        if _SPACED_NUMBER.fullmatch(inner):
            inner = inner.replace(" ", "")
        text = f"\\boxed{{{inner}}}"
    forms: list[Any] = math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    percent = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
    if any(isinstance(form, sympy.Expr) and form.has(percent) for form in forms):
        is_percentage = True
        forms = [
            form.xreplace({percent: sympy.Integer(1)}) if isinstance(form, sympy.Expr) else form
            for form in forms
        ]
    return _Result(forms, is_percentage)


def _readable(text: str) -> str:
    """Return a text with its numbers as `math-verify` and Python read them."""
    text = text.translate(_SIGNS)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _fraction(sign: str) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}")
    return f"\\frac{{{numerator}}}{{{denominator}}}"


def _is_as_exact(expected: Any, result: Any) -> bool:
    """Return whether numbers that `math-verify`, which rounds to six decimals, finds equal are so relatively.

    Rational numbers must be equal, others within `MAX_DIFFERENCE`.
    """
    import sympy

    pair = [value for value in (expected, result) if isinstance(value, sympy.Expr)]
    if len(pair) < 2 or not all(value.is_number for value in pair):
        return True
    one, two = (value.doit() for value in pair)
    if one.is_Rational and two.is_Rational:
        return bool(one == two)
    return bool(abs(one - two).evalf() <= MAX_DIFFERENCE * max(abs(one.evalf()), abs(two.evalf())))


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
