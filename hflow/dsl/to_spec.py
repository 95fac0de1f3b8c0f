"""From a `Definition` to a `NodeSpec`: no live object is left, costs and layouts are data."""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hflow.dsl.definition import Definition
from hflow.dsl.nodetype import NodeType, Shapes
from hflow.dsl.options import SPEC_FIELDS
from hflow.graph.errors import recipe_error
from hflow.graph.ir import BodyRef, Knob, Level, NodeSpec, Parameter
from hflow.types import Unit

_LAYOUTS = ("sharded", "single")


def to_spec(node: Definition) -> NodeSpec:
    """The node as a value.

    Raises:
        RecipeError: when its models are open, or a user's NodeType gives no valid cost or layout.
    """
    kind = node.kind
    if kind.is_open:
        raise recipe_error(node.where, node.name, f"its model is open: list use({node.name}, MODEL) instead")
    settings = kind.settings
    parameters = tuple(replace(p, field=node.reads.get(p.name, p.name)) for p in node.signature.parameters)
    return NodeSpec(
        name=node.name,
        verb=kind.verb,
        level=kind.fires,
        body=_body_ref(node),
        where=node.where,
        models=tuple(model.name for model in kind.all_models),
        parameters=parameters,
        provided=_provided(node),
        returns=node.results.fields,
        metrics=node.results.metrics,
        opens_stream=kind.opens_stream,
        streams=node.results.streams,
        group=settings.get("group", 1),
        on=settings.get("on"),
        data=kind.bound["data"].name if "data" in kind.bound else None,
        reads_weights=kind.reads_weights,
        writes_weights=kind.writes_weights,
        knobs=tuple(Knob(knob.name, knob.type, node.knobs[knob.name]) for knob in node.signature.knobs),
        options=_options(kind, node, parameters),
        every=settings["every"],
        after=settings["after"],
        layouts=_layouts(node),
        cost=_cost(node),
        shape=kind.draw(),
        implicit=node.implicit,
    )


def _provided(node: Definition) -> tuple[tuple[str, str], ...]:
    """Provided parameters; where there are several engines, each with its model."""
    models = dict(zip(node.engines, (m.name for m in node.kind.models), strict=False))
    several = len(node.engines) > 1
    return tuple(
        (name, f"engine:{models[name]}" if several and kind == "engine" else kind)
        for name, kind in node.signature.provided
    )


def _options(
    kind: NodeType, node: Definition, parameters: tuple[Parameter, ...]
) -> tuple[tuple[str, Any], ...]:
    """Every option with its value; those that depend on the body are decided here."""
    settings = {name: value for name, value in kind.settings.items() if name not in SPEC_FIELDS}
    if settings.get("min_group", 0) is None:
        settings["min_group"] = 2 if _needs_group(kind, node, parameters) else 1
    if settings.get("prox", "") is None:
        reads_prox = any(parameter.field == "prox_logprobs" for parameter in parameters)
        settings["prox"] = "recompute" if reads_prox else "none"
    return tuple(settings.items())


def _needs_group(kind: NodeType, node: Definition, parameters: tuple[Parameter, ...]) -> bool:
    is_pairwise = kind.verb == "train" and node.results.fields[0].unit is Unit.GROUP
    return kind.fires is Level.GROUP or is_pairwise or any(p.field == "group" for p in parameters)


def _layouts(node: Definition) -> tuple[tuple[str, str], ...]:
    layouts = tuple((result.field, node.kind.layout(result.field)) for result in node.results.fields)
    for field, layout in layouts:
        if layout not in _LAYOUTS:
            raise recipe_error(
                node.where, node.name, f"layout({field!r}) is {layout!r}, not one of {_LAYOUTS}"
            )
    return layouts


def _cost(node: Definition) -> tuple[tuple[str, float], ...]:
    """The coefficients of an affine cost; empty where the planner's own model holds."""
    cost = node.kind.cost
    constant = cost(Shapes(0, 0, 0))
    slopes = [cost(s) - constant for s in (Shapes(1, 0, 0), Shapes(0, 1, 0), Shapes(0, 0, 1))]
    predicted = constant + 300 * slopes[0] + 20 * slopes[1] + 5 * slopes[2]
    if abs(cost(Shapes(300, 20, 5)) - predicted) > 1e-6 * max(1.0, abs(predicted)):
        raise recipe_error(
            node.where, node.name, "cost(shapes) must be affine in tokens, sequences and groups"
        )
    names = ("constant", "tokens", "sequences", "groups")
    values = (constant, *slopes)
    return tuple(zip(names, values, strict=True)) if any(values) else ()


def _body_ref(node: Definition) -> BodyRef:
    body = node.body
    return BodyRef(body.__module__, body.__qualname__, _digest(body, node))


def _digest(body: Callable[..., Any], node: Definition) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(body))
    except OSError as error:
        raise recipe_error(node.where, node.name, "its source cannot be read; define it in a file") from error
    return hashlib.sha256(source.encode()).hexdigest()[:16]
