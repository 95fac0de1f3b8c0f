"""Checks what a body returned for one sample or one group, and makes plain Python values of it.

It is one table, which docs/nodes.md shows to users:

| declared | may be | is kept as |
|-|-|-|
| `float` | a finite number of 64 bits | float |
| `int` | a whole number of 64 bits | int |
| `bool` | True, False, 1 or 0 | bool |
| `str` | a string | str |
| `list[float]`, `list[int]`, `list[bool]` | one such number for each token of the sample | list |
| `Messages` | messages (`normal_messages`) | list of dicts |
| `dict`, `list[dict]` | what JSON can hold: no NaN, and only strings as keys | dict, list |
| `Metrics` | a dict of numbers | dict of floats |
| `Trajectory` | see `checked_trajectory` | `Trajectory` |
| `list[Trajectory]`, of an episode | at least one | one sample |

Scalars and arrays of numpy and torch count as the Python numbers and lists of their values, with a gradient
or without. Everything else is a `ReturnError`, which refuses what an exception of the body would refuse: the
sample, the group or, of bodies of whole batches, the run.

This module must import neither numpy nor torch: it is used in child processes, which stay small.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hflow.base.errors import DataError, ReturnError
from hflow.base.json_text import find_json_problem
from hflow.data.text.messages import normal_messages
from hflow.types import Trajectory, Unit

CallLevel = Literal["sample", "group"]

_EXACT = 2**53
"""Float64 holds every integer up to this one."""
_PLAIN = frozenset((type(None), bool, int, float, str))


class _NotPlainError(Exception):
    """A value that is not made of None, booleans, numbers, strings, lists, and dicts with strings as keys."""


@dataclass(frozen=True)
class DeclaredReturns:
    """What a body that is called per sample or per group declares to return."""

    node: str
    returns: tuple[tuple[str, str], ...]
    """(field, unit) of each returned field."""
    scalars: Mapping[str, str] = field(default_factory=dict)
    """Field -> the type that its body declares, such as `float` or `list[float]`."""
    metrics: bool = False
    """Whether the last result is a dict of metrics."""
    level: CallLevel = "sample"

    def read(self, result: Any, lengths: Sequence[int]) -> tuple[tuple[Any, ...], dict[str, float]]:
        """Return the value of each field, and the metrics, of what the body returned.

        `lengths` are the tokens of each sample that it was called for.

        Raises:
            ReturnError: if that is not what it declares.
        """
        values, metrics = split_result(self.node, self.returns, self.metrics, result)
        return self.read_fields(values, lengths), checked_metrics(self.node, metrics)

    def read_fields(self, values: Sequence[Any], lengths: Sequence[int]) -> tuple[Any, ...]:
        """Return the value of each field; of a per-group body lists over the members, except for GROUP.

        Raises:
            ReturnError: if one is not what the body declares.
        """
        return tuple(
            self._read_field(name, Unit(unit), value, lengths)
            for (name, unit), value in zip(self.returns, values, strict=True)
        )

    def _read_field(self, name: str, unit: Unit, value: Any, lengths: Sequence[int]) -> Any:
        declared = self.scalars.get(name, "")
        if self.level == "sample" or unit is Unit.GROUP:
            return checked_value(self.node, name, unit, value, lengths[0], declared)
        rows = checked_rows(self.node, name, value, len(lengths))
        return [
            checked_value(self.node, name, unit, row, length, declared)
            for row, length in zip(rows, lengths, strict=True)
        ]


def split_result(
    node: str, returns: Sequence[tuple[str, str]], metrics: bool, result: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split what a body returned into its fields, in order, and its metrics.

    Raises:
        ReturnError: if the number of results is not the declared one, or the metrics are not a dict.
    """
    expected = len(returns) + metrics
    results = tuple(result) if expected > 1 and isinstance(result, tuple | list) else (result,)
    if len(results) != expected:
        names = [name for name, _ in returns] + ["metrics"] * metrics
        raise ReturnError(
            f"node {node!r} returned {len(results)} results, but declares {expected}: {', '.join(names)}; "
            "return these"
        )
    if not metrics:
        return results, {}
    if not isinstance(results[-1], dict):
        kind = type(results[-1]).__name__
        raise ReturnError(
            f"node {node!r} declares Metrics, but its last result is a {kind}, not a dict; return one"
        )
    return results[:-1], results[-1]


def checked_rows(node: str, name: str, value: Any, size: int) -> list[Any]:
    """Return the members of a list with one value for each of `size` samples.

    Raises:
        ReturnError: if it is no such list.
    """
    rows = value.tolist() if _is_array(value) else value
    if not isinstance(rows, list | tuple) or len(rows) != size:
        got = f"{len(rows)} values" if isinstance(rows, list | tuple) else _shown(value)
        raise ReturnError(f"node {node!r}: {name!r} must be a list of {size} values, the body returned {got}")
    return list(rows)


def checked_value(node: str, name: str, unit: Unit, value: Any, num_tokens: int, declared: str = "") -> Any:
    """Return the value of one sample as a plain Python value.

    `declared` is the type that the body declares, such as `float`; empty: any of the unit.

    Raises:
        ReturnError: if the value is not one of its unit and type.
    """
    try:
        plain = plain_value(value)
    except Exception:  # noqa: BLE001 - objects of users, or lists that contain themselves
        raise ReturnError(
            f"node {node!r}: {name!r} must be {_WANTED[unit]}, the body returned {_shown(value)}"
        ) from None
    kind = declared.replace("list[", "").rstrip("]")
    if unit is Unit.TOKEN:
        return _token_numbers(node, name, plain, num_tokens, kind)
    if unit in (Unit.SEQUENCE, Unit.GROUP):
        return _number(node, name, plain, kind)
    if unit is Unit.MESSAGES:
        try:
            return normal_messages(plain, name)
        except DataError as error:
            raise ReturnError(f"node {node!r}: {error}") from error
    if not isinstance(plain, str if unit is Unit.TEXT else _JSON_TYPES.get(declared, object)):
        problem: str | None = f"must be {_WANTED[unit]}, the body returned {_shown(plain)}"
    else:
        problem = find_json_problem(plain)
    if problem:
        raise ReturnError(f"node {node!r}: {name!r} {problem}")
    return plain


def checked_metrics(node: str, metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return metrics of one call as floats.

    Raises:
        ReturnError: if one is not a number.
    """
    return {name: _metric(node, name, value) for name, value in metrics.items()}


def checked_trajectory(node: str, trajectory: Any) -> Trajectory:
    """Return a trajectory whose token fields are tuples of plain Python numbers.

    Token ids are 0 or more, versions -1 or more, log-probs finite, and messages are what JSON can hold.

    Raises:
        ReturnError: if it is no trajectory, or one without tokens or with other values.
    """
    if not isinstance(trajectory, Trajectory) or not len(trajectory.input_ids):
        got = "an empty one" if isinstance(trajectory, Trajectory) else _shown(trajectory)
        raise ReturnError(f"node {node!r} must return a trajectory with tokens, not {got}")
    changes: dict[str, Any] = {}
    for name, kind in _TOKEN_FIELDS.items():
        values = getattr(trajectory, name)
        if type(values) is not tuple or set(map(type, values)) != {_TYPES[kind]}:
            plain = checked_value(node, f"{name} of the trajectory", Unit.TOKEN, values, len(values), kind)
            values = changes[name] = tuple(plain)
        if kind == "float" and not all(map(math.isfinite, values)):
            raise ReturnError(f"node {node!r}: {name} of the trajectory has a value that is not finite")
        lowest = _LOWEST.get(name)
        if lowest is not None and min(values) < lowest:
            raise ReturnError(
                f"node {node!r}: {name} of the trajectory has {min(values)}; the lowest is {lowest}"
            )
    for name in ("messages", "completion"):
        unit = Unit.JSON if name == "messages" else Unit.TEXT
        checked_value(node, f"{name} of the trajectory", unit, getattr(trajectory, name), 0)
    return dataclasses.replace(trajectory, **changes) if changes else trajectory


def plain_value(value: Any) -> Any:
    """Return a value with numbers, lists and dicts of Python in the place of those of numpy and torch.

    Tuples become lists, as in JSON.

    Raises:
        Exception: if it has another part. The kind is unknown.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return list(value) if _PLAIN.issuperset(map(type, value)) else [plain_value(item) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _NotPlainError
        return {plain_value(key): plain_value(item) for key, item in value.items()}
    if _is_array(value):
        return plain_value(value.tolist())
    for kind in (bool, int, float, str):  # subclasses, such as members of an IntEnum
        if isinstance(value, kind):
            return kind.__str__(value) if kind is str else kind(value)
    raise _NotPlainError


_WANTED = {
    Unit.TEXT: "a string",
    Unit.SEQUENCE: "a number",
    Unit.GROUP: "a number",
    Unit.TOKEN: "a list of numbers",
    Unit.MESSAGES: "a list of messages",
    Unit.JSON: "JSON (a dict with strings as keys, or a list, of finite numbers and strings)",
}
_JSON_TYPES: Mapping[str, type] = {"dict": dict, "list[dict]": list}
_TOKEN_FIELDS = {"input_ids": "int", "loss_mask": "bool", "behav_logprobs": "float", "versions": "int"}
_TYPES: Mapping[str, type] = {"int": int, "bool": bool, "float": float}
_LOWEST = {"input_ids": 0, "versions": -1}


def _is_array(value: Any) -> bool:
    """Return whether a value is a scalar or an array of numpy, or a tensor of torch."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    return (numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)) or (
        torch is not None and isinstance(value, torch.Tensor)
    )


def _shown(value: Any) -> str:
    """Return a value for a message: plain ones as Python writes them, of others the type and shape."""
    if type(value) in (*_PLAIN, list, dict, tuple):
        try:
            return f"{value!r:.60}"
        except Exception:  # noqa: BLE001 - what it contains may raise anything
            return type(value).__name__
    shape = f" of shape {list(value.shape)}" if _is_array(value) else ""
    return f"{type(value).__name__}{shape}"


def _number(node: str, name: str, value: Any, kind: str) -> bool | int | float:
    """Return a number as one of the declared kind: `float`, `int`, `bool`, or any if it is empty."""
    got = f"the body returned {_shown(value)}"
    if not isinstance(value, bool | int | float):
        problem = f"must be a number, {got}"
    elif isinstance(value, float) and not math.isfinite(value):
        problem = f"is {value}, not a finite number"
    elif (kind == "int" or isinstance(value, int)) and not -(2**63) <= value < 2**63:
        problem = "must be a number, the body returned a number of more than 64 bits"
    elif kind == "bool" and value not in (0, 1):
        problem = f"must be True or False, {got}"
    elif kind == "int" and value != int(value):
        problem = f"must be a whole number, {got}"
    elif kind == "float" and isinstance(value, int) and abs(value) > _EXACT:
        problem = f"is declared as float, which cannot hold {value}; declare it as int"
    else:
        return _TYPES[kind](value) if kind in _TYPES else value
    raise ReturnError(f"node {node!r}: {name!r} {problem}")


def _token_numbers(node: str, name: str, values: Any, num_tokens: int, kind: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != num_tokens:
        got = f"{len(values)} of them" if isinstance(values, list) else _shown(values)
        raise ReturnError(
            f"node {node!r}: {name!r} is per token, so it must be a list of {num_tokens} numbers; the body "
            f"returned {got}"
        )
    if set(map(type, values)) == {float} and kind in ("", "float") and all(map(math.isfinite, values)):
        return values
    return [_number(node, name, value, kind) for value in values]


def _metric(node: str, name: Any, value: Any) -> float:
    try:
        plain = plain_value(value)
    except Exception:  # noqa: BLE001 - as in `checked_value`
        plain = None
    if not isinstance(name, str) or not isinstance(plain, bool | int | float):
        raise ReturnError(f"node {node!r}: metric {name!r:.60} must be a number, not {_shown(value)}")
    try:
        return float(plain)
    except OverflowError:
        raise ReturnError(f"node {node!r}: metric {name!r:.60} is larger than any float") from None
