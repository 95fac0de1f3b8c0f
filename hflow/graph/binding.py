"""Binds the parameters of nodes to fields."""

from __future__ import annotations

from collections.abc import Iterator

from hflow.errors import RecipeError, nearest
from hflow.graph.errors import recipe_error
from hflow.graph.field_table import UNIT_NAMES, Field, Fields, column_fields
from hflow.graph.ir import Level, Node, NodeSpec, Parameter, Read, RecipeSpec
from hflow.graph.prox import framework_parameters, makes_own_prox
from hflow.graph.streams import StreamAssignment
from hflow.types import Unit


def bind_node(node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment, fields: Fields) -> Node:
    """The node with every parameter bound; an optional one that nobody produces stays unbound.

    Raises:
        RecipeError: when nobody produces an input, several streams do, or its unit does not fit.
    """
    tiers = list(_scope(node, spec, assignment, fields))
    stream = assignment.stream_of[node.name]
    reads: list[Read] = []
    unbound: list[str] = []
    for parameter in (*node.parameters, *framework_parameters(node)):
        if makes_own_prox(node, parameter):
            field: Field | None = Field(parameter.field, stream, node.name, Unit.TOKEN)
        else:
            field = _find(node, parameter, tiers)
        if field is None:
            unbound.append(parameter.name)
        else:
            _check_unit(node, parameter, field, stream)
            reads.append(_read(parameter, field))
    return Node(node, stream, tuple(reads), tuple(unbound))


def unbound_notes(
    node: Node, spec: RecipeSpec, assignment: StreamAssignment, fields: Fields
) -> Iterator[str]:
    """For each unbound parameter, its name and the nearest field's."""
    names = [name for tier in _scope(node.spec, spec, assignment, fields) for name in tier]
    for parameter in node.spec.parameters:
        if parameter.name in node.unbound:
            yield f"{node.name}({parameter.name}) keeps its default{nearest(parameter.field, names)}"


Tier = dict[str, list[Field]]
"""Fields at one distance from the reader, by name."""


def _scope(node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment, fields: Fields) -> Iterator[Tier]:
    """Fields that a node can see, nearest first. A source sees what is there before its samples."""
    stream = assignment.stream(assignment.stream_of[node.name])
    own = node.streams if node.opens_stream else ()
    if node.opens_stream and stream.parent is None:
        yield {name: [field] for name, field in column_fields(spec, stream).items()}
        return
    for streams in assignment.tiers(stream.parent if node.opens_stream and stream.parent else stream.name):
        tier: Tier = {}
        for name in streams:
            for field in fields[name].values() if name not in own else ():
                tier.setdefault(field.name, []).append(field)
        yield tier


def _find(node: NodeSpec, parameter: Parameter, tiers: list[Tier]) -> Field | None:
    for tier in tiers:
        found = tier.get(parameter.field, [])
        if len({field.producer for field in found}) > 1:
            streams = ", ".join(field.stream for field in found)
            text = f"{parameter.field!r} is in several streams ({streams}): choose with on="
            raise _fault(node, parameter, text)
        if found:
            return found[0]
    if parameter.optional:
        return None
    names = [name for tier in tiers for name in tier]
    hint = nearest(parameter.field, names) or f"; there are {', '.join(sorted(names))}"
    raise _fault(node, parameter, f"nobody produces {parameter.field!r}{hint}")


def _check_unit(node: NodeSpec, parameter: Parameter, field: Field, stream: str) -> None:
    if field.unit is Unit.TOKEN and field.stream != stream and not _is_own_parent(node):
        raise _fault(
            node,
            parameter,
            f"{field.name!r} speaks of the tokens of stream {field.stream!r}, not of {stream!r}",
        )
    if parameter.name == "@mask" and field.scalar not in ("", "tensor", "bool", "list[bool]"):
        raise _fault(node, parameter, f"the mask {field.name!r} must be bool, not {field.scalar}")
    if field.unit.widens_to(parameter.unit):
        return
    wanted, has = UNIT_NAMES[parameter.unit], UNIT_NAMES[field.unit]
    ask = _remedy(node, parameter, field)
    raise _fault(
        node, parameter, f"reads {field.name!r} as {wanted}, but {field.producer} makes it {has}{ask}"
    )


def _is_own_parent(node: NodeSpec) -> bool:
    """A source reads its parent's tokens as plain values, before there are any of its own."""
    return node.opens_stream


def _remedy(node: NodeSpec, parameter: Parameter, field: Field) -> str:
    if not parameter.unit.widens_to(field.unit):
        return ""
    if node.level is Level.BATCH:
        return ": narrow it in a compute, with seqs.sum, mean or members"
    return ": a unit is never narrowed by itself; take the list"


def _read(parameter: Parameter, field: Field) -> Read:
    return Read(
        parameter.name,
        parameter.field,
        field.stream,
        field.producer,
        field.unit,
        parameter.unit,
        parameter.scalar,
    )


def _fault(node: NodeSpec, parameter: Parameter, text: str) -> RecipeError:
    return recipe_error(node.where, node.name, text, parameter.name)
