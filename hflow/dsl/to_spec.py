"""`to_spec`: convert a `Definition` to a `NodeSpec`, a frozen value in which costs and layouts are data."""

from __future__ import annotations

import hashlib
import inspect
import math
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hflow.dsl.first_pass import first_pass_of
from hflow.dsl.node_body import has_setup
from hflow.dsl.nodetype import Definition, NodeType, Shapes
from hflow.dsl.options import SPEC_FIELDS
from hflow.graph.errors import recipe_error
from hflow.graph.ir import BodyRef, Knob, Level, NodeSpec, Parameter
from hflow.types import Unit

_LAYOUTS = ("sharded", "single")


def to_spec(node: Definition[..., Any]) -> NodeSpec:
    """Return a node as a frozen value.

    Raises:
        RecipeError: if a model is missing, or a user's NodeType returns an invalid cost, layout or memory.
    """
    kind = node.kind
    if kind.has_open_models:
        problem = f"the node has no model yet. List use({node.name}, MODEL) instead"
        raise recipe_error(node.where, node.name, problem)
    options = kind.option_values
    parameters = tuple(replace(p, field=node.reads.get(p.name, p.field)) for p in node.signature.parameters)
    return NodeSpec(
        name=node.name,
        verb=kind.runs_as,
        level=kind.node_level,
        body=_body_ref(node),
        where=node.where,
        models=tuple(model.name for model in kind.all_models),
        parameters=parameters,
        provided=_provided(node),
        returns=node.results.fields,
        metrics=node.results.metrics,
        opens_stream=kind.opens_stream,
        streams=node.results.streams,
        group=options.get("group", 1),
        on=options.get("on"),
        data=kind.given_objects["data"].name if "data" in kind.given_objects else None,
        reads_weights=kind.reads_weights,
        writes_weights=kind.writes_weights,
        knobs=tuple(Knob(knob.name, knob.type, node.knobs[knob.name]) for knob in node.signature.knobs),
        options=_options(kind, node, parameters),
        every=options["every"],
        after=options["after"],
        layouts=_layouts(node),
        cost=_cost(node),
        memory=_memory(node),
        shape=kind.draw(),
        has_setup=has_setup(node),
        kind="" if kind.verb == kind.runs_as else kind.verb,
        implicit=node.implicit,
    )


def _provided(node: Definition[..., Any]) -> tuple[tuple[str, str], ...]:
    """Return the provided parameters with their kinds; if there are several engines, each with its model."""
    models = dict(zip(node.engines, (m.name for m in node.kind.models), strict=False))
    several = len(node.engines) > 1
    return tuple(
        (name, f"engine:{models[name]}" if several and kind == "engine" else kind)
        for name, kind in node.signature.provided
    )


def _options(
    kind: NodeType, node: Definition[..., Any], parameters: tuple[Parameter, ...]
) -> tuple[tuple[str, Any], ...]:
    """Return every option with its value. Defaults that depend on the body are filled in here."""
    options = {name: value for name, value in kind.option_values.items() if name not in SPEC_FIELDS}
    if options.get("min_group", 0) is None:
        options["min_group"] = 2 if _needs_group(kind, node, parameters) else 1
    if options.get("prox", "") is None:
        reads_prox = any(parameter.field == "prox_logprobs" for parameter in parameters)
        options["prox"] = "recompute" if reads_prox else "none"
    return tuple(options.items())


def _needs_group(kind: NodeType, node: Definition[..., Any], parameters: tuple[Parameter, ...]) -> bool:
    has_group_loss = kind.runs_as == "train" and node.results.fields[0].unit is Unit.GROUP
    return kind.node_level is Level.GROUP or has_group_loss or any(p.field == "group" for p in parameters)


def _layouts(node: Definition[..., Any]) -> tuple[tuple[str, str], ...]:
    layouts = tuple((result.field, node.kind.layout(result.field)) for result in node.results.fields)
    for field, layout in layouts:
        if layout not in _LAYOUTS:
            problem = f"layout({field!r}) must return 'sharded' or 'single', not {layout!r}"
            raise recipe_error(node.where, node.name, problem)
    return layouts


def _cost(node: Definition[..., Any]) -> tuple[tuple[str, float], ...]:
    """Return the coefficients of an affine cost; none if it is 0, so that the planner estimates it."""
    cost = node.kind.cost
    constant = cost(Shapes(0, 0, 0))
    slopes = [cost(s) - constant for s in (Shapes(1, 0, 0), Shapes(0, 1, 0), Shapes(0, 0, 1))]
    predicted = constant + 300 * slopes[0] + 20 * slopes[1] + 5 * slopes[2]
    if abs(cost(Shapes(300, 20, 5)) - predicted) > 1e-6 * max(1.0, abs(predicted)):
        problem = "cost(shapes) must be affine in tokens, sequences and groups"
        raise recipe_error(node.where, node.name, problem)
    names = ("constant", "tokens", "sequences", "groups")
    values = (constant, *slopes)
    return tuple(zip(names, values, strict=True)) if any(values) else ()


def _memory(node: Definition[..., Any]) -> int:
    memory = node.kind.memory()
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 <= memory < math.inf:
        problem = f"memory() must return a number of bytes, not {memory!r}"
        raise recipe_error(node.where, node.name, problem)
    return int(memory)


def _body_ref(node: Definition[..., Any]) -> BodyRef:
    body = node.body
    return BodyRef(body.__module__, body.__qualname__, _source_digest(body, node))


def _source_digest(body: Callable[..., Any], node: Definition[..., Any]) -> str:
    functions = filter(None, (body, first_pass_of(body)))
    try:
        source = "".join(textwrap.dedent(inspect.getsource(function)) for function in functions)
    except OSError as error:
        problem = "the function's source cannot be read. Define it in a file"
        raise recipe_error(node.where, node.name, problem) from error
    return hashlib.sha256(source.encode()).hexdigest()[:16]
