"""`Definition`: a decorated body together with its node type, options and knobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from hflow.dsl.first_pass import first_pass_of, with_first_pass
from hflow.dsl.return_types import ErrorFactory, ReturnTypes
from hflow.dsl.signature import Signature, read_signature
from hflow.errors import RecipeError
from hflow.graph.errors import recipe_error
from hflow.graph.source_location import SourceLocation, definition_location

if TYPE_CHECKING:
    from hflow.dsl.nodetype import NodeType

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

ATTRIBUTE = "__hflow__"
"""The attribute of a decorated function that holds its definition."""


@dataclass(frozen=True)
class Definition(Generic[Arguments, Result]):
    """One node of a recipe. Calling it calls its body, with the body's own parameters and result."""

    name: str
    kind: NodeType
    """The decorator, with its models and options."""
    body: Callable[Arguments, Result]
    where: SourceLocation
    signature: Signature
    results: ReturnTypes
    knobs: Mapping[str, Any]
    reads: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> the field that it reads, for parameters that are not named like their field."""
    engines: tuple[str, ...] = ()
    """The body's Engine parameters, in the order of the decorator's models."""
    implicit: bool = False
    """Whether the framework added the node."""

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Call the body."""
        return self.body(*args, **kwargs)


def definition_of(node: object) -> Definition[..., Any] | None:
    """Return the definition of a decorated function or of a variant made by `use`; None for anything else."""
    return node if isinstance(node, Definition) else getattr(node, ATTRIBUTE, None)


def define(
    kind: NodeType, body: Callable[..., Any], base: Definition[..., Any] | None = None
) -> Definition[..., Any]:
    """Read the signature of a body and check that a node type can run it.

    Args:
        kind: the decorator.
        body: the function.
        base: the definition of which the new one is a variant. Its name, location, knobs, `reads` and order
            of engines are kept.

    Raises:
        RecipeError: if the node type cannot run the body.
    """
    where = base.where if base else definition_location(body)

    def error(problem: str) -> RecipeError:
        return recipe_error(where, body.__name__, problem)

    _check_async(kind, body, error)
    signature = read_signature(body, where, kind.form, _provided_kinds(kind))
    if function := first_pass_of(body):
        if kind.runs_as != "train":
            raise error(f"@first_pass is for train nodes, and this is @{kind.verb}. Remove it")
        signature = with_first_pass(signature, function, error)
    name = base.name if base else body.__name__
    if not name.isascii():
        raise error("the name must have ASCII letters only, as overrides name the node. Rename the function")
    results = kind.read_results(signature.result, name, error)
    _check_knob_names(kind, signature, error)
    _check_required_parameters(kind, signature, error)
    engines = base.engines if base and base.engines else _order_engines(kind, signature, error)
    knobs = {knob.name: knob.value for knob in signature.knobs}
    fresh: Definition[..., Any] = Definition(
        name, kind, body, where, signature, results, knobs, engines=engines
    )
    return replace(fresh, knobs={**knobs, **base.knobs}, reads=base.reads) if base else fresh


def _provided_kinds(kind: NodeType) -> tuple[str, ...]:
    """Return the kinds of parameters that are provided; those of whole batches exist for batches only."""
    batch_only = {"sequences", "state", "tensordict"}
    return kind.provides if kind.form == "tensor" else tuple(set(kind.provides) - batch_only)


def _check_async(kind: NodeType, body: Callable[..., Any], error: ErrorFactory) -> None:
    is_async = inspect.iscoroutinefunction(body)
    if kind.is_async is True and not is_async:
        raise error(f"the body of @{kind.verb} must be asynchronous. Write 'async def'")
    if is_async and (kind.is_async is False or kind.form == "tensor"):
        raise error(
            "only bodies of generate, and of compute with per='sample' or per='group', may be 'async def'. "
            "Write 'def'"
        )
    if inspect.iscoroutinefunction(type(kind).run) and (
        kind.runs_as not in ("compute", "generate") or kind.form == "tensor"
    ):
        raise error(
            f"run of {type(kind).__name__} is 'async def', which only kinds like generate, and like compute "
            "per sample or group, can have. Write 'def'"
        )


def _check_knob_names(kind: NodeType, signature: Signature, error: ErrorFactory) -> None:
    for knob in signature.knobs:
        if not knob.name.isascii():
            raise error(f"knob {knob.name!r} must have ASCII letters only, as overrides name it. Rename it")
        if knob.name in kind.option_names:
            raise error(f"knob {knob.name!r} has the same name as an option of @{kind.verb}. Rename the knob")


def _check_required_parameters(kind: NodeType, signature: Signature, error: ErrorFactory) -> None:
    provided = [provided_kind for _, provided_kind in signature.provided]
    for needed in kind.needs:
        if needed not in provided:
            annotation = needed.capitalize()
            raise error(f"the body of @{kind.verb} needs a parameter annotated with {annotation}. Add one")


def _order_engines(kind: NodeType, signature: Signature, error: ErrorFactory) -> tuple[str, ...]:
    """Return the Engine parameters in the order of the models. With several models, names must match."""
    engines = tuple(name for name, provided_kind in signature.provided if provided_kind == "engine")
    models = tuple(model.name for model in kind.models)
    if not models or (len(engines) <= 1 and len(models) <= 1):
        return engines
    if sorted(engines) != sorted(models):
        raise error(
            f"with several models, the body needs one Engine parameter named after each model. "
            f"The models are {', '.join(models)}, the Engine parameters {', '.join(engines) or 'none'}. "
            "Rename the parameters"
        )
    return models
