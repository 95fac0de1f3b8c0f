"""Parses JSON that others wrote, strictly, and finds what in a value is not JSON."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from hflow.base.errors import shorten

_MAX_DEPTH = 100
LONG_NUMBER = f"a whole number of more than {sys.get_int_max_str_digits():,} digits"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document.

    Bytes must be UTF-8. Unlike `json.loads`, it refuses objects that have a key twice, NaN, Infinity, and
    numbers that are larger than the largest float.

    Raises:
        ValueError: for anything else, with the reason.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        if is_of_long_number(error):
            raise ValueError(f"it has {LONG_NUMBER}") from None
        raise


def is_of_long_number(error: BaseException) -> bool:
    """Return whether Python refuses to read text as a number because of its length, which costs time."""
    return "integer string conversion" in str(error)


def find_json_problem(value: Any) -> str | None:
    """Return the reason why a Python value is not JSON, as in `has NaN, ...`; None if it is."""
    values = [value]
    for _ in range(_MAX_DEPTH):
        inner: list[Any] = []
        for item in values:
            if isinstance(item, str):
                if not item.isascii() and _LONE_SURROGATE.search(item):
                    return "has half of a surrogate pair, which is no text"
            elif isinstance(item, float):
                if math.isnan(item):
                    return "has NaN, which is no JSON value (libraries write it where a value is missing)"
                if math.isinf(item):
                    return f"has {item}, which is no JSON value"
            elif isinstance(item, list | tuple):
                inner += item
            elif isinstance(item, Mapping):
                inner += item
                inner += item.values()
            elif item is not None and not isinstance(item, int):
                return f"has a value of type {type(item).__name__}, which JSON does not have"
        values = inner
        if not values:
            return None
    return f"is nested more than {_MAX_DEPTH} levels deep"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        ((repeated, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated!r} is there twice")
    return values


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{shorten(text, 40)} is larger than the largest float")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
