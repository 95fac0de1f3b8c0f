"""What an annotation says: the unit of a field and the type in which the body receives it."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from hflow.graph.field_table import UNIT_NAMES
from hflow.types import Engine, Output, Sequences, State, Tokenizer, Unit
from hflow.types.units import Provided

Form = Literal["tensor", "sample", "group", "weights"]
"""How a body sees its fields: packed tensors of a batch, one sample's plain values, lists over a
group's members, or single weight tensors."""

ALLOWED_TYPES: dict[Form, str] = {
    "tensor": "PerToken, PerSequence, PerGroup, Text or Json",
    "sample": "str, float, int, bool, list[float], list[int], list[bool], dict or list[dict]",
    "group": "a list over the members, such as list[float] or list[str], or a group's float, int or bool",
    "weights": "Tensor",
}

PROVIDED_TYPES: dict[Any, str] = {
    Engine: "engine",
    Output: "output",
    Sequences: "sequences",
    Tokenizer: "tokenizer",
    State: "state",
}
"""Annotations that the framework fills in -> kind."""

_BATCH_SCALAR = {Unit.TEXT: "list[str]", Unit.JSON: "list[Any]"}
_NUMBERS = (float, int, bool)


@dataclass(frozen=True)
class Typed:
    """A field's unit, and the type that stands in the body."""

    unit: Unit
    scalar: str


def read_hint(hint: Any, form: Form) -> Typed | None:
    """What an annotation means in a body of that form, or None where it means nothing."""
    if form == "tensor":
        unit = unit_of(hint)
        return Typed(unit, _BATCH_SCALAR.get(unit, "tensor")) if unit else None
    if form == "weights":
        return None
    return _sample(hint) if form == "sample" else _group(hint)


def unit_of(hint: Any) -> Unit | None:
    """The unit in `PerToken`, `PerSequence`, `PerGroup`, `Text`, `Json`; None in anything else."""
    marks = getattr(hint, "__metadata__", ())
    return next((mark for mark in marks if isinstance(mark, Unit)), None)


def hint_text(hint: Any) -> str:
    """An annotation as a recipe writes it."""
    unit = unit_of(hint)
    if unit is not None:
        return UNIT_NAMES[unit]
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def is_metrics(hint: Any) -> bool:
    """Whether it is `Metrics`."""
    return Provided.METRICS in getattr(hint, "__metadata__", ())


def split_optional(hint: Any) -> tuple[Any, bool]:
    """`X | None` -> (X, True); anything else -> (itself, False)."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    rest = [argument for argument in get_args(hint) if argument is not type(None)]
    return (rest[0], True) if len(rest) == 1 else (hint, False)


def result_hints(hint: Any) -> list[Any]:
    """`tuple[U, V]` -> [U, V]; one type -> [it]; None -> []."""
    if hint is type(None):
        return []
    return list(get_args(hint)) if get_origin(hint) is tuple else [hint]


def _sample(hint: Any) -> Typed | None:
    if hint is str:
        return Typed(Unit.TEXT, "str")
    if hint in _NUMBERS:
        return Typed(Unit.SEQUENCE, hint.__name__)
    if _is_dict(hint):
        return Typed(Unit.JSON, "dict")
    item = _item(hint)
    if item in _NUMBERS:
        return Typed(Unit.TOKEN, f"list[{item.__name__}]")
    return Typed(Unit.JSON, "list[dict]") if _is_dict(item) else None


def _group(hint: Any) -> Typed | None:
    if hint in _NUMBERS:
        return Typed(Unit.GROUP, hint.__name__)
    member = _sample(_item(hint))
    return Typed(member.unit, f"list[{member.scalar}]") if member else None


def _item(hint: Any) -> Any:
    arguments = get_args(hint)
    return arguments[0] if get_origin(hint) is list and arguments else None


def _is_dict(hint: Any) -> bool:
    return hint is dict or get_origin(hint) is dict
