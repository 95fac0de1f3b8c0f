"""`use`: a variant of a node, with other models, names, options or knobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hflow.dsl.definition import Definition, define, definition_of
from hflow.dsl.model import Model
from hflow.dsl.source_location import caller_location
from hflow.errors import RecipeError, nearest
from hflow.graph.errors import recipe_error
from hflow.graph.ir import SourceLocation
from hflow.validation import check_value


def use(
    node: Any,
    *models: Model,
    name: str | None = None,
    reads: Mapping[str, str] | None = None,
    **options_and_knobs: Any,
) -> Definition:
    """Make a variant of a decorated function, of a library node or of another variant.

    Args:
        node: what to vary; it stays as it is.
        *models: replace its models (or fill those that a library node leaves open).
        name: of the new node; by default the old one's.
        reads: parameter -> field that it reads instead of the one named like it.
        **options_and_knobs: the decorator's options (`on=`, `data=`, `every=`, ...) and the body's
            knobs.

    Raises:
        RecipeError: for anything that is no node, model, parameter, option or knob.
    """
    where = caller_location()
    old = definition_of(node)
    if old is None:
        raise RecipeError(f"{where}: use() takes a decorated function, not {node!r}")
    knobs = {knob.name: knob.type for knob in old.signature.knobs}
    options = {key: value for key, value in options_and_knobs.items() if key not in knobs}
    for key in options:
        if key not in old.kind.known:
            hint = nearest(key, (*knobs, *old.kind.known, "name", "reads"))
            raise recipe_error(where, old.name, f"it has no option or knob {key!r}{hint}")
    base = replace(old, name=_checked_name(name, old, where), where=where)
    new = define(old.kind.variant(models, options), old.body, of=base)
    bound = {
        key: _bound(new, key, value, knobs[key]) for key, value in options_and_knobs.items() if key in knobs
    }
    return replace(new, knobs={**new.knobs, **bound}, reads={**new.reads, **_checked_reads(new, reads or {})})


def _checked_name(name: str | None, old: Definition, where: SourceLocation) -> str:
    if name is not None and not name.isidentifier():
        raise recipe_error(where, old.name, f"name={name!r} is no identifier")
    return name or old.name


def _bound(node: Definition, key: str, value: Any, kind: str) -> Any:
    try:
        return check_value(value, kind)
    except ValueError as error:
        raise recipe_error(node.where, node.name, f"knob {key} is {error}") from error


def _checked_reads(node: Definition, reads: Mapping[str, str]) -> Mapping[str, str]:
    known = [parameter.name for parameter in node.signature.parameters]
    for parameter in reads:
        if parameter not in known:
            hint = nearest(parameter, known)
            raise recipe_error(node.where, node.name, f"reads= names no parameter {parameter!r}{hint}")
    return reads
