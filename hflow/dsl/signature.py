"""Reads a body's signature: which parameters are edges, which are provided, which are knobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from hflow.dsl.annotations import ALLOWED_TYPES, PROVIDED_TYPES, Form, hint_text, read_hint, split_optional
from hflow.errors import RecipeError
from hflow.graph.errors import recipe_error
from hflow.graph.ir import Knob, Parameter, SourceLocation
from hflow.types import Tensor
from hflow.validation import check_value, text_of_type

_EMPTY = inspect.Parameter.empty


@dataclass(frozen=True)
class Signature:
    """The parameters of a body, sorted by what they are."""

    parameters: tuple[Parameter, ...]
    provided: tuple[tuple[str, str], ...]
    knobs: tuple[Knob, ...]
    result: Any
    """The result's annotation."""


def read_signature(
    body: Callable[..., Any], where: SourceLocation, form: Form, provides: Sequence[str]
) -> Signature:
    """Read a body.

    Args:
        body: the function.
        where: its place, for messages.
        form: how its fields look.
        provides: kinds of provided parameters that its verb has.

    Raises:
        RecipeError: for a parameter without annotation, of an unknown type or of a kind that its
            verb does not provide, a knob without default, a result without annotation.
    """
    reader = _Reader(body, where, form, provides)
    parameters: list[Parameter] = []
    provided: list[tuple[str, str]] = []
    knobs: list[Knob] = []
    for parameter in inspect.signature(body).parameters.values():
        hint = reader.hint(parameter)
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            knobs.append(reader.knob(parameter, hint))
        elif kind := reader.provided(parameter, hint):
            provided.append((parameter.name, kind))
        else:
            parameters.append(reader.edge(parameter, hint))
    if form == "weights":
        provided = reader.weights([name for name, _ in provided])
    return Signature(tuple(parameters), tuple(provided), tuple(knobs), reader.result())


class _Reader:
    """One body under reading."""

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
            raise self._fault(f"an annotation names {error.name!r}, which is not defined") from error

    def hint(self, parameter: inspect.Parameter) -> Any:
        """The parameter's annotation."""
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise self._fault(
                "a body has no *args or **kwargs: every parameter is an edge or a knob", parameter
            )
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise self._fault("edges are passed by name: drop the '/'", parameter)
        if parameter.name not in self._hints:
            raise self._fault(f"it has no annotation: say {ALLOWED_TYPES[self._form]}", parameter)
        return self._hints[parameter.name]

    def result(self) -> Any:
        """The result's annotation."""
        if "return" not in self._hints:
            raise self._fault("annotate its result")
        return self._hints["return"]

    def provided(self, parameter: inspect.Parameter, hint: Any) -> str | None:
        """The kind of a parameter that the framework fills in; None for an edge."""
        if hint is Tensor and self._form == "weights":
            return "weight"
        kind = PROVIDED_TYPES.get(hint) if isinstance(hint, type) else None
        if kind is not None and kind not in self._provides:
            has = ", ".join(sorted(self._provides)) or "nothing"
            raise self._fault(f"{hint.__name__} is not provided here; this verb has: {has}", parameter)
        return kind

    def edge(self, parameter: inspect.Parameter, hint: Any) -> Parameter:
        """A parameter before `*`."""
        bare, optional = split_optional(hint)
        typed = read_hint(bare, self._form)
        if typed is None:
            raise self._fault(
                f"it is {hint_text(hint)}; here an edge is {ALLOWED_TYPES[self._form]}", parameter
            )
        if (parameter.default is None) != optional or parameter.default not in (None, _EMPTY):
            raise self._fault(
                "an edge has no default but None, with '| None'; a hyper-parameter goes after '*'", parameter
            )
        return Parameter(parameter.name, parameter.name, typed.unit, typed.scalar, optional)

    def weights(self, names: list[str]) -> list[tuple[str, str]]:
        """Target and source of an update body."""
        if len(names) != 2:
            raise self._fault("an update body takes two Tensors, target and source, and knobs after '*'")
        return [(names[0], "target"), (names[1], "source")]

    def knob(self, parameter: inspect.Parameter, hint: Any) -> Knob:
        """A parameter after `*`."""
        kind = text_of_type(hint)
        if kind is None:
            raise self._fault(
                f"knob of type {hint_text(hint)}: a knob is int, float, bool, str, a Literal, "
                f"tuple[T, ...] of them, or one of these '| None'",
                parameter,
            )
        if parameter.default is _EMPTY:
            raise self._fault("a knob needs a default", parameter)
        try:
            return Knob(parameter.name, kind, check_value(parameter.default, kind))
        except ValueError as error:
            raise self._fault(f"its default is {error}", parameter) from error

    def _fault(self, text: str, parameter: inspect.Parameter | None = None) -> RecipeError:
        return recipe_error(self._where, self._name, text, parameter.name if parameter else None)
