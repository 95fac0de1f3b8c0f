"""`use`: a variant of a node with other models, names, options or knobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import EllipsisType
from typing import Any, cast

from hflow.base.errors import RecipeError, nearest
from hflow.base.validation import check_value, is_name
from hflow.dsl.bodies import loss_hint
from hflow.dsl.dataset import Dataset
from hflow.dsl.nodetype import Arguments, Definition, Result, define, definition_of
from hflow.graph.errors import SourceLocation, caller_location, recipe_error
from hflow.graph.model import Model


def use(
    node: Callable[Arguments, Result],
    *models: Model,
    name: str | None = None,
    on: str | EllipsisType | None = ...,
    data: Dataset | EllipsisType | None = ...,
    reads: Mapping[str, str] | None = None,
    every: int | EllipsisType = ...,
    **options_and_knobs: Any,
) -> Definition[Arguments, Result]:
    """Make a variant of a decorated function, of a node of the library or of another variant.

    What is not given stays as it is in `node`, which itself does not change.

    Args:
        node: the node to vary.
        *models: models in the place of the node's own, or for those that a node of the library leaves open.
        name: the name of the variant. Default: the name of the node.
        on: the stream that the variant works on, or from which it derives.
        data: the dataset that feeds the stream of the variant, for evaluation.
        reads: parameter -> the field that it reads instead of the field with the parameter's name.
        every: run in every n-th step only.
        **options_and_knobs: other options of the decorator, and knobs of the body.

    Raises:
        RecipeError: if `node` is not a node, or a model, parameter, option or knob does not exist or fit.
    """
    where = caller_location()
    old = definition_of(node)
    if old is None:
        raise RecipeError(
            f"{where}: use() takes a decorated function, not {node!r}. Decorate it, as in @compute()"
        )
    named = {"on": on, "data": data, "every": every}
    values = {key: value for key, value in named.items() if value is not ...} | options_and_knobs
    knob_types = {knob.name: knob.type for knob in old.signature.knobs}
    options = {key: value for key, value in values.items() if key not in knob_types}
    for key, value in options.items():
        if key not in old.kind.option_names:
            hint = loss_hint(old.body.__module__, old.body.__name__, key, value)
            hint = hint or nearest(key, (*knob_types, *old.kind.option_names, "name", "reads"))
            raise recipe_error(where, old.name, f"there is no option or knob {key!r}{hint}")
    base = replace(old, name=_checked_name(name, old, where), where=where)
    new = define(old.kind.variant(models, options), old.body, base)
    knobs = {
        key: _checked_knob(new, key, value, knob_types[key])
        for key, value in values.items()
        if key in knob_types
    }
    checked_reads = _checked_reads(new, reads or {})
    variant = replace(new, knobs={**new.knobs, **knobs}, reads={**new.reads, **checked_reads}, varied=old)
    return cast("Definition[Arguments, Result]", variant)


def _checked_name(name: str | None, old: Definition[..., Any], where: SourceLocation) -> str:
    if name is not None and not is_name(name):
        raise recipe_error(
            where, old.name, f"name={name!r} must be an identifier of ASCII letters, such as 'eval_gen'"
        )
    return name or old.name


def _checked_knob(node: Definition[..., Any], name: str, value: Any, knob_type: str) -> Any:
    try:
        return check_value(value, knob_type)
    except ValueError as error:
        fix = "; pass JSON text, as json.dumps writes it" if isinstance(value, Mapping) else ""
        raise recipe_error(node.where, node.name, f"knob {name} is {error}{fix}") from error


def _checked_reads(node: Definition[..., Any], reads: Mapping[str, str]) -> Mapping[str, str]:
    names = [parameter.name for parameter in node.signature.parameters]
    for parameter in reads:
        if parameter not in names:
            hint = nearest(parameter, names)
            raise recipe_error(node.where, node.name, f"reads=: there is no parameter {parameter!r}{hint}")
    return reads
