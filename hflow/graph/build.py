"""`build_graph`: convert a recipe's declarations to a checked graph. A pure function.

`bind_node` finds the field that each parameter of a node reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hflow.base.errors import RecipeError, nearest
from hflow.graph.check import check_graph, warnings_of
from hflow.graph.edges import data_edges, overwrite_edges, same_step_order, state_edges, weight_edges
from hflow.graph.errors import recipe_error
from hflow.graph.field_table import UNIT_NAMES, Field, FieldTable, build_field_table, column_fields, sees
from hflow.graph.framework_reads import (
    FLAG_OPTIONS,
    check_flags,
    check_lists,
    check_prox,
    check_readers_of_images,
    check_recorded_kinds,
    computes_own_prox,
    cut_parameters,
    framework_parameters,
    image_parameters,
    replayed_parameters,
    resolve_prox,
    resolve_sampling_replay,
    unread_prox,
)
from hflow.graph.ir import Edge, Graph, Level, Node, NodeSpec, Parameter, Read, RecipeSpec, Stream
from hflow.graph.streams import StreamAssignment, assign_streams
from hflow.graph.tensordicts import add_tensordict_reads
from hflow.types import Unit


def bind_node(node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment, fields: FieldTable) -> Node:
    """Return a node whose parameters are bound to fields. Optional parameters without a field stay unbound.

    Raises:
        RecipeError: if no node or several streams produce an input, or the unit of its field does not fit.
    """
    scopes = list(_scopes(node, spec, assignment, fields))
    stream = assignment.stream_of[node.name]
    framework = (
        *framework_parameters(node, trains_own_samples(node, spec, assignment)),
        *replayed_parameters(node, spec, assignment),
        *cut_parameters(node, spec, assignment),
        *image_parameters(node, spec, assignment),
    )
    reads: list[Read] = []
    unbound: list[str] = []
    for parameter in (*node.parameters, *framework):
        if computes_own_prox(node, parameter):
            field: Field | None = Field(parameter.field, stream, node.name, Unit.TOKEN)
        else:
            field = _find_field(node, parameter, scopes)
        if field is None:
            unbound.append(parameter.name)
        else:
            _check_unit(node, parameter, field, stream)
            reads.append(_read(parameter, field))
    return Node(node, stream, tuple(reads), tuple(unbound))


def trains_own_samples(node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment) -> bool:
    """Return whether a train node's model generated the samples of its stream."""
    source = assignment.root(assignment.stream_of[node.name]).source
    return any(other.name == source and {*node.models} & {*other.models} for other in spec.nodes)


def unbound_notes(
    node: Node, spec: RecipeSpec, assignment: StreamAssignment, fields: FieldTable
) -> Iterator[str]:
    """Yield one line for each unbound parameter, with the field that has the most similar name.

    Fields that the node reads already are not suggested: they are where they belong.
    """
    taken = {name for read in node.reads for name in (read.field, read.parameter)}
    scopes = _scopes(node.spec, spec, assignment, fields)
    names = [name for scope in scopes for name in scope if name not in taken]
    is_blind = not sees(spec.models, node.spec)
    for parameter in node.spec.parameters:
        if parameter.name in node.unbound and not (is_blind and parameter.unit is Unit.IMAGES):
            yield f"{node.name}({parameter.name}) keeps its default{nearest(parameter.field, names)}"


Scope = dict[str, list[Field]]
"""Fields by name, of one stream or of several that are equally close to the reader."""


def _scopes(
    node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment, fields: FieldTable
) -> Iterator[Scope]:
    """Yield the fields that a node can read, closest first.

    A node that opens a stream reads what exists before its samples: dataset columns or the parent stream.
    """
    stream = assignment.stream(assignment.stream_of[node.name])
    opened = node.streams if node.opens_stream else ()
    if node.opens_stream and stream.parent is None:
        yield {name: [field] for name, field in column_fields(spec, stream).items()}
        return
    start = stream.parent if node.opens_stream and stream.parent else stream.name
    for streams in assignment.search_order(start):
        scope: Scope = {}
        for name in streams:
            for field in fields[name].values() if name not in opened else ():
                scope.setdefault(field.name, []).append(field)
        yield scope


def _find_field(node: NodeSpec, parameter: Parameter, scopes: list[Scope]) -> Field | None:
    for scope in scopes:
        candidates = scope.get(parameter.field, [])
        if len({field.producer for field in candidates}) > 1:
            streams = ", ".join(field.stream for field in candidates)
            raise _error(
                node, parameter, f"{parameter.field!r} is in several streams ({streams}). Choose one with on="
            )
        if candidates:
            return candidates[0]
    if parameter.optional:
        return None
    names = [name for scope in scopes for name in scope]
    hint = f"{nearest(parameter.field, names)}; the fields here are {', '.join(sorted(names))}"
    raise _error(node, parameter, f"no node or dataset column produces {parameter.field!r}{hint}")


def _check_unit(node: NodeSpec, parameter: Parameter, field: Field, stream: str) -> None:
    # A source may read its parent's tokens, as plain values: it has no tokens of its own yet.
    if field.unit is Unit.TOKEN and field.stream != stream and not node.opens_stream:
        raise _error(
            node,
            parameter,
            f"{field.name!r} belongs to the tokens of stream {field.stream!r}, but the node works on "
            f"{stream!r}. Set on={field.stream!r}, or reduce the field to one value per sequence first",
        )
    is_flag = parameter.name.removeprefix("@") in FLAG_OPTIONS and parameter.name.startswith("@")
    if is_flag and field.scalar not in ("", "tensor", "bool", "list[bool]"):
        raise _error(node, parameter, f"the mask {field.name!r} must be bool, not {field.scalar}")
    if field.unit.widens_to(parameter.unit):
        return
    is_column = field.producer == node.name and node.opens_stream
    origin = "the dataset has" if is_column else f"{field.producer} produces"
    raise _error(
        node,
        parameter,
        f"{field.name!r} is read as {UNIT_NAMES[parameter.unit]}, but {origin} "
        f"{UNIT_NAMES[field.unit]}{_reading_fix(node, parameter, field)}",
    )


def _reading_fix(node: NodeSpec, parameter: Parameter, field: Field) -> str:
    """Return the reading of a field: reduced to a smaller unit, or as the object that it is."""
    if parameter.unit is Unit.TEXT and field.unit is Unit.MESSAGES:
        return (
            ". Use nodes.chat_gen, which encodes messages with the model's chat template, or annotate the "
            "parameter with Messages"
        )
    if parameter.unit is Unit.TEXT and field.unit is Unit.JSON:
        as_json = "Json" if node.level is Level.BATCH else "dict or list[dict]"
        return f". Annotate the parameter with {as_json}. Chats are Messages, which nodes.chat_gen reads"
    if parameter.unit is Unit.MESSAGES and field.unit is Unit.JSON:
        return ". Declare the column as Messages, or annotate the parameter with list[dict]"
    if not parameter.unit.widens_to(field.unit):
        return ""
    if node.level is Level.BATCH:
        return ". Reduce it in a compute node with seqs.sum, seqs.mean or seqs.members"
    return ". Annotate the parameter with a list"


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


def _error(node: NodeSpec, parameter: Parameter, problem: str) -> RecipeError:
    return recipe_error(node.where, node.name, problem, parameter.name)


def build_graph(spec: RecipeSpec) -> Graph:
    """Bind every parameter to a field, derive the edges and check the graph.

    The nodes are in an order in which they can run within a step; where several could be next, in the order
    of the recipe.

    Raises:
        RecipeError: if the recipe is wrong. The message has file:line, function, parameter and, for an
            unknown name, the most similar one.
    """
    assignment = assign_streams(spec)
    check_prox(spec, assignment)
    spec = resolve_sampling_replay(resolve_prox(spec, assignment), assignment)
    fields = build_field_table(spec, assignment)
    bound = [bind_node(node, spec, assignment, fields) for node in spec.nodes]
    skipped = list(unread_prox(bound))
    nodes = add_tensordict_reads([node for node in bound if node not in skipped], fields)
    edges = _edges(nodes, assignment.streams)
    graph = Graph(
        name=spec.name,
        dataset=spec.dataset,
        nodes=tuple(nodes),
        edges=tuple(edges),
        streams=assignment.streams,
        models=spec.models,
        datasets=spec.datasets,
        skipped=tuple(node.name for node in skipped if not node.spec.implicit),
        notes=tuple(note for node in nodes for note in unbound_notes(node, spec, assignment, fields)),
    )
    check_graph(graph)
    check_recorded_kinds(graph)
    check_lists(graph)
    check_flags(graph)
    check_readers_of_images(graph)
    return replace(graph, nodes=_in_order(nodes, edges), warnings=tuple(warnings_of(graph, spec)))


def _edges(nodes: Sequence[Node], streams: Sequence[Stream]) -> list[Edge]:
    return [
        *data_edges(nodes, streams),
        *state_edges(nodes),
        *weight_edges(nodes, streams),
        *overwrite_edges(nodes, streams),
    ]


def _in_order(nodes: Sequence[Node], edges: Sequence[Edge]) -> tuple[Node, ...]:
    """Sort nodes by their edges of lag 0."""
    position = {node.name: i for i, node in enumerate(nodes)}
    order = same_step_order(edges, position)
    return tuple(nodes[position[name]] for name in order.in_order(position))
