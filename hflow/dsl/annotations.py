"""Annotations of bodies: the unit of a field and the type in which the body receives it."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hflow.graph.field_table import UNIT_NAMES
from hflow.types import (
    Engine,
    Image,
    Output,
    SeparateSequences,
    Sequences,
    State,
    TensorDict,
    Tokenizer,
    Unit,
)
from hflow.types.units import Provided

Form = Literal["tensor", "sample", "group", "weights"]
"""The form in which a body receives its fields: packed tensors of a batch, plain values of one sample,
lists over the members of a group, or single weight tensors."""

ALLOWED_TYPES: dict[Form, str] = {
    "tensor": "PerToken, PerSequence, PerGroup, Text or Json",
    "sample": "str, float, int, bool, list[float], list[int], list[bool], Messages, Image, list[Image], "
    "dict or list[dict]",
    "group": "a list over the members, such as list[float] or list[str], or one float, int or bool per group",
    "weights": "Tensor",
}
"""The annotations of fields in each form, for error messages."""

PROVIDED_TYPES: dict[Any, str] = {
    Engine: "engine",
    Output: "output",
    Sequences: "sequences",
    SeparateSequences: "separate_sequences",
    Tokenizer: "tokenizer",
    State: "state",
}
"""Annotations of parameters that the framework provides, and the kind of each."""

_SAMPLE_SCALAR = {Unit.MESSAGES: "list[dict]", Unit.IMAGE: "Image", Unit.IMAGES: "list[Image]"}
_BATCH_SCALAR = {Unit.TEXT: "list[str]", Unit.JSON: "list[Any]"}
_NUMBERS = (float, int, bool)
_OF_SAMPLES = (Unit.MESSAGES, Unit.IMAGE, Unit.IMAGES)
"""Units that bodies of whole batches do not read; they read messages as `Json`."""


@dataclass(frozen=True)
class FieldType:
    """The unit of a field, and the type of its value in the body."""

    unit: Unit
    scalar: str


def read_hint(hint: Any, form: Form) -> FieldType | None:
    """Return the type that an annotation names in a body of this form, or None if it names none."""
    if form == "tensor":
        unit = unit_of(hint)
        if unit is None or unit in _OF_SAMPLES:
            return None
        return FieldType(unit, _BATCH_SCALAR.get(unit, "tensor"))
    if form == "weights":
        return None
    return _sample_type(hint) if form == "sample" else _group_type(hint)


def unit_of(hint: Any) -> Unit | None:
    """Return the unit that an annotation names, such as `PerToken`, `Text` or `list[Image]`, else None."""
    if hint is Image:
        return Unit.IMAGE
    if _item_type(hint) is Image:
        return Unit.IMAGES
    metadata = getattr(hint, "__metadata__", ())
    return next((item for item in metadata if isinstance(item, Unit)), None)


def tensordict_fields(hint: Any) -> Mapping[str, Any] | None:
    """Return the fields that `Annotated[TensorDict, {NAME: UNIT}]` names, with their annotations.

    They are empty for `TensorDict` alone, and None for any other annotation. The class may be hflow's or that
    of the library itself.
    """
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    module, name = getattr(kind, "__module__", ""), getattr(kind, "__name__", "")
    is_library = module.partition(".")[0] == "tensordict" and name in ("TensorDict", "TensorDictBase")
    if kind is not TensorDict and not is_library:
        return None
    metadata = getattr(hint, "__metadata__", ())
    return {name: unit for item in metadata if isinstance(item, Mapping) for name, unit in item.items()}


def hint_text(hint: Any) -> str:
    """Return an annotation as a recipe writes it."""
    unit = unit_of(hint)
    if unit is not None:
        return UNIT_NAMES[unit]
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def is_metrics(hint: Any) -> bool:
    """Return whether an annotation is `Metrics`."""
    return Provided.METRICS in getattr(hint, "__metadata__", ())


def split_optional(hint: Any) -> tuple[Any, bool]:
    """Return `(X, True)` for `X | None`, and the annotation itself with False for anything else."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    rest = [argument for argument in get_args(hint) if argument is not type(None)]
    return (rest[0], True) if len(rest) == 1 else (hint, False)


def result_hints(hint: Any) -> list[Any]:
    """Split a result annotation: `tuple[U, V]` into two, None into none, any other type into itself."""
    if hint is type(None):
        return []
    return list(get_args(hint)) if get_origin(hint) is tuple else [hint]


def _sample_type(hint: Any) -> FieldType | None:
    if hint is str:
        return FieldType(Unit.TEXT, "str")
    if (unit := unit_of(hint)) in _OF_SAMPLES:
        return FieldType(unit, _SAMPLE_SCALAR[unit])
    if hint in _NUMBERS:
        return FieldType(Unit.SEQUENCE, hint.__name__)
    if _is_dict(hint):
        return FieldType(Unit.JSON, "dict")
    item = _item_type(hint)
    if item in _NUMBERS:
        return FieldType(Unit.TOKEN, f"list[{item.__name__}]")
    return FieldType(Unit.JSON, "list[dict]") if _is_dict(item) else None


def _group_type(hint: Any) -> FieldType | None:
    if hint in _NUMBERS:
        return FieldType(Unit.GROUP, hint.__name__)
    member = _sample_type(_item_type(hint))
    return FieldType(member.unit, f"list[{member.scalar}]") if member else None


def _item_type(hint: Any) -> Any:
    arguments = get_args(hint)
    return arguments[0] if get_origin(hint) is list and arguments else None


def _is_dict(hint: Any) -> bool:
    return hint is dict or get_origin(hint) is dict
