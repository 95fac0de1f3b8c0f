"""`Definition`: a decorated body with everything that its decorator said, not yet a value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hflow.dsl.return_types import ErrorFactory, ReturnTypes
from hflow.dsl.signature import Signature, read_signature
from hflow.dsl.source_location import definition_location
from hflow.errors import RecipeError
from hflow.graph.errors import recipe_error
from hflow.graph.ir import SourceLocation

if TYPE_CHECKING:
    from hflow.dsl.nodetype import NodeType

ATTRIBUTE = "__hflow__"
"""Where a decorator leaves its definition on the function."""


@dataclass(frozen=True)
class Definition:
    """One node of a recipe: a body, its kind with models and options, its bound knobs.

    It is called like its body.
    """

    name: str
    kind: NodeType
    body: Callable[..., Any]
    where: SourceLocation
    signature: Signature
    results: ReturnTypes
    knobs: Mapping[str, Any]
    reads: Mapping[str, str] = field(default_factory=dict)
    """parameter -> field, where they differ."""
    engines: tuple[str, ...] = ()
    """Engine parameters in the order of the kind's models."""
    implicit: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the body."""
        return self.body(*args, **kwargs)


def definition_of(node: Any) -> Definition | None:
    """The definition behind a decorated function or a `use`; None for anything else."""
    return node if isinstance(node, Definition) else getattr(node, ATTRIBUTE, None)


def define(kind: NodeType, body: Callable[..., Any], of: Definition | None = None) -> Definition:
    """Read a body under a kind.

    Args:
        kind: the decorator.
        body: the function.
        of: the definition of which this one is a variant; its knobs and engine order are kept.

    Raises:
        RecipeError: when the body is not one that the kind can run.
    """
    where = of.where if of else definition_location(body)

    def fault(text: str) -> RecipeError:
        return recipe_error(where, body.__name__, text)

    _check_async(kind, body, fault)
    signature = read_signature(body, where, kind.form, _provides(kind))
    name = of.name if of else body.__name__
    results = kind.read_results(signature.result, name, fault)
    _check_names(kind, signature, fault)
    engines = of.engines if of and of.engines else _engine_order(kind, signature, fault)
    fresh = Definition(name, kind, body, where, signature, results, {}, engines=engines)
    defaults = {knob.name: knob.value for knob in signature.knobs}
    return replace(fresh, knobs={**defaults, **(of.knobs if of else {})}, reads=of.reads if of else {})


def _provides(kind: NodeType) -> tuple[str, ...]:
    """Kinds of provided parameters; Sequences and State are a batch's."""
    return kind.provides if kind.form == "tensor" else tuple(set(kind.provides) - {"sequences", "state"})


def _check_async(kind: NodeType, body: Callable[..., Any], fault: ErrorFactory) -> None:
    is_async = inspect.iscoroutinefunction(body)
    if kind.is_async is True and not is_async:
        raise fault(f"an @{kind.verb} body is an episode: write 'async def'")
    if is_async and (kind.is_async is False or kind.form == "tensor"):
        raise fault("only generate and per-sample or per-group compute bodies may be 'async def'")


def _check_names(kind: NodeType, signature: Signature, fault: ErrorFactory) -> None:
    for knob in signature.knobs:
        if knob.name in kind.known:
            raise fault(f"knob {knob.name!r} has the name of an option of @{kind.verb}; rename it")
    kinds = [kind for _, kind in signature.provided]
    for needed in kind.needs:
        if needed not in kinds:
            raise fault(f"an @{kind.verb} body takes its {needed.capitalize()}: add a parameter for it")


def _engine_order(kind: NodeType, signature: Signature, fault: ErrorFactory) -> tuple[str, ...]:
    """Engine parameters in the order of the models, which they are named after if several."""
    engines = tuple(name for name, provided in signature.provided if provided == "engine")
    models = tuple(model.name for model in kind.models)
    if len(engines) <= 1 and len(models) <= 1:
        return engines
    if not models:
        return engines
    if sorted(engines) != sorted(models):
        raise fault(f"one Engine per model, by its name: models {models}, Engine parameters {engines}")
    return models
