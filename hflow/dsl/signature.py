"""`read_signature`: sort a body's parameters into edges, provided parameters and knobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from hflow.base.errors import RecipeError
from hflow.base.validation import check_value, text_of_type
from hflow.dsl.annotations import (
    ALLOWED_TYPES,
    PROVIDED_TYPES,
    Form,
    hint_text,
    read_hint,
    split_optional,
    tensordict_fields,
    unit_of,
)
from hflow.graph.errors import SourceLocation, recipe_error
from hflow.graph.ir import Knob, Parameter
from hflow.types import State, Tensor, TensorDict, Unit

TENSORDICT = "tensordict"
"""The kind of a parameter that receives many fields at once."""
_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Signature:
    """The parameters of a body by kind, and its result annotation."""

    parameters: tuple[Parameter, ...]
    """Edges: parameters before `*` that read a field."""
    provided: tuple[tuple[str, str], ...]
    """Parameters that the framework provides, each with its kind."""
    knobs: tuple[Knob, ...]
    """Parameters after `*`."""
    result: Any


def read_signature(
    body: Callable[..., Any], where: SourceLocation, form: Form, provides: Sequence[str]
) -> Signature:
    """Read the signature of a body.

    Args:
        body: the function.
        where: the function's location, for messages.
        form: the form of its fields.
        provides: the kinds of provided parameters that it may have.

    Raises:
        RecipeError: for a parameter or result without annotation or with an unknown one, a parameter that is
            not provided here, or a knob without default.
    """
    reader = _SignatureReader(body, where, form, provides)
    parameters: list[Parameter] = []
    provided: list[tuple[str, str]] = []
    knobs: list[Knob] = []
    for parameter in inspect.signature(body).parameters.values():
        hint = reader.hint(parameter)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            knobs.append(reader.knob(parameter, hint))
        elif kind := reader.provided_kind(parameter, hint):
            provided.append((parameter.name, kind))
            if kind == TENSORDICT:
                parameters += reader.members(parameter, hint)
        else:
            parameters.append(reader.edge(parameter, hint))
    if form == "weights":
        provided = reader.target_and_source([name for name, _ in provided])
    return Signature(tuple(parameters), tuple(provided), tuple(knobs), reader.result_hint())


class _SignatureReader:
    """Reads the parameters of one body."""

    def __init__(
        self, body: Callable[..., Any], where: SourceLocation, form: Form, provides: Sequence[str]
    ) -> None:
        self._name = body.__name__
        self._where = where
        self._form = form
        self._provides = provides
        try:
            self._hints = get_type_hints(body, include_extras=True)
        except NameError as error:
            problem = f"an annotation uses {error.name!r}, which is not defined. Import or define it"
            raise self._error(problem) from error

    def hint(self, parameter: inspect.Parameter) -> Any:
        """Return a parameter's annotation."""
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            problem = "*args and **kwargs are not allowed: every parameter is an edge or a knob. Name it"
            raise self._error(problem, parameter)
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise self._error("hflow passes parameters by name. Remove the '/'", parameter)
        if parameter.name not in self._hints:
            allowed = ALLOWED_TYPES[self._form]
            raise self._error(f"the parameter has no annotation. Annotate it with {allowed}", parameter)
        return self._hints[parameter.name]

    def result_hint(self) -> Any:
        """Return the result annotation."""
        if "return" not in self._hints:
            raise self._error("the function has no result annotation. Add one after '->'")
        return self._hints["return"]

    def provided_kind(self, parameter: inspect.Parameter, hint: Any) -> str | None:
        """Return the kind of a parameter that the framework provides; None for an edge."""
        if hint is Tensor and self._form == "weights":
            return "weight"
        kind = PROVIDED_TYPES.get(hint) if isinstance(hint, type) else None
        if tensordict_fields(hint) is not None:
            kind, hint = TENSORDICT, TensorDict
        if kind is not None and kind not in self._provides:
            provided = ", ".join(name.capitalize() for name in sorted(self._provides)) or "nothing"
            fix = f"this body can have {provided}"
            if hint is State and self._form in ("sample", "group"):
                fix = "keep it in a body with per='batch', whose Sequences have the groups"
            raise self._error(f"{hint.__name__} is not provided here; {fix}", parameter)
        return kind

    def members(self, parameter: inspect.Parameter, hint: Any) -> Iterator[Parameter]:
        """Read the fields that the annotation of a TensorDict names. Each is a parameter `NAME.FIELD`."""
        for field, field_hint in (tensordict_fields(hint) or {}).items():
            unit = unit_of(field_hint)
            if unit not in (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP):
                raise self._error(
                    f"{field!r} of a TensorDict is {hint_text(field_hint)}, but must be PerToken, "
                    "PerSequence or PerGroup. Read texts with a parameter of their own",
                    parameter,
                )
            yield Parameter(f"{parameter.name}.{field}", field, unit, "tensor")

    def edge(self, parameter: inspect.Parameter, hint: Any) -> Parameter:
        """Read a parameter before `*`."""
        required_hint, optional = split_optional(hint)
        field_type = read_hint(required_hint, self._form)
        if field_type is None:
            allowed = ALLOWED_TYPES[self._form]
            raise self._error(f"the annotation {hint_text(hint)} does not fit here. Use {allowed}", parameter)
        if (parameter.default is None) != optional or parameter.default not in (None, _EMPTY):
            raise self._error(
                "a parameter before '*' reads a field and has no default, except '= None' with the "
                "annotation 'X | None'. Put a hyper-parameter after '*'",
                parameter,
            )
        return Parameter(parameter.name, parameter.name, field_type.unit, field_type.scalar, optional)

    def target_and_source(self, names: list[str]) -> list[tuple[str, str]]:
        """Name the two weight tensors of an update body."""
        if len(names) != 2:
            raise self._error(
                f"the body of @update takes two Tensors before '*', target and source, not {len(names)}. "
                "Write (target: Tensor, source: Tensor)"
            )
        return [(names[0], "target"), (names[1], "source")]

    def knob(self, parameter: inspect.Parameter, hint: Any) -> Knob:
        """Read a parameter after `*`."""
        knob_type = text_of_type(hint)
        if knob_type is None:
            raise self._error(
                f"a knob (a parameter after '*') cannot be {hint_text(hint)}. Use int, float, bool, str, "
                f"a Literal, tuple[T, ...] of one of them, or one of these with '| None'",
                parameter,
            )
        if parameter.default is _EMPTY:
            raise self._error(
                "a knob (a parameter after '*') needs a default. Add one, as in 'scale: float = 1.0'",
                parameter,
            )
        try:
            return Knob(parameter.name, knob_type, check_value(parameter.default, knob_type))
        except ValueError as error:
            raise self._error(f"the default is {error}", parameter) from error

    def _error(self, problem: str, parameter: inspect.Parameter | None = None) -> RecipeError:
        return recipe_error(self._where, self._name, problem, parameter.name if parameter else None)
