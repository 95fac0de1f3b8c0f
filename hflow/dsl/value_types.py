"""Types of knobs and options, written as text, and the check of a value against one.

A type is alternatives joined by ` | `: `int`, `float`, `bool`, `str`, `None`, a quoted choice such
as `'none'`, or `tuple[T, ...]` of one of these.
"""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin

_SCALARS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}


def conform(value: Any, kind: str) -> Any:
    """Return `value` as the type wants it (an int becomes a float, a list a tuple).

    Raises:
        TypeError: when no alternative takes it; the message reads after "X is".
    """
    for alternative in kind.split(" | "):
        fits, conformed = _try(value, alternative)
        if fits:
            return conformed
    raise TypeError(f"{value!r}, not {kind.replace(' | ', ' or ')}")


def type_text(hint: Any) -> str | None:
    """The text of a knob's annotation, or None where knobs cannot have that type."""
    if hint is type(None):
        return "None"
    if hint in _SCALARS.values():
        return str(hint.__name__)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(repr(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        parts = [type_text(argument) for argument in arguments]
        return " | ".join(part for part in parts if part) if all(parts) else None
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return f"tuple[{inner}, ...]" if (inner := type_text(arguments[0])) in _SCALARS else None
    return None


def _try(value: Any, alternative: str) -> tuple[bool, Any]:
    if alternative == "None":
        return value is None, None
    if alternative.startswith("tuple["):
        return _try_tuple(value, alternative.removeprefix("tuple[").removesuffix(", ...]"))
    if alternative not in _SCALARS:
        return repr(value) == alternative, value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if alternative == "float" and is_number:
        return True, float(value)
    return type(value) is _SCALARS[alternative], value


def _try_tuple(value: Any, inner: str) -> tuple[bool, Any]:
    if not isinstance(value, list | tuple):
        return False, None
    tried = [_try(item, inner) for item in value]
    return all(fits for fits, _ in tried), tuple(item for _, item in tried)
