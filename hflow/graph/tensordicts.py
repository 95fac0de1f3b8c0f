"""The fields that a parameter annotated `TensorDict` reads: all numbers of its stream made before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hflow.graph.arcs import Arcs
from hflow.graph.field_table import Field, FieldTable
from hflow.graph.ir import Level, Node, NodeSpec, Read
from hflow.types import Unit

_NUMBERS = (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP)


def add_tensordict_reads(nodes: Sequence[Node], fields: FieldTable) -> list[Node]:
    """Return the nodes with all reads of TensorDicts whose annotation names no fields.

    Such a parameter reads every field of the node's stream with an entry per token, sequence or group. Fields
    of the node itself and of nodes after it are left out, and fields that are made in fewer steps.
    """
    flow = Arcs((read.producer, node.name) for node in nodes for read in node.reads)
    return [_with_reads(node, nodes, flow, fields) for node in nodes]


def is_produced_for(producer: NodeSpec, reader: NodeSpec) -> bool:
    """Return whether a node runs in every step in which a reader of its fields runs."""
    offset = reader.after - producer.after
    is_in_step = offset >= 0 and offset % producer.every == 0 and reader.every % producer.every == 0
    return producer.opens_stream or is_in_step


def _with_reads(node: Node, nodes: Sequence[Node], flow: Arcs, fields: FieldTable) -> Node:
    reads = node.reads
    for name, kind in node.spec.provided:
        named = any(parameter.name.startswith(f"{name}.") for parameter in node.spec.parameters)
        if kind == "tensordict" and not named:
            after = flow.descendants(node.name)
            reads += tuple(_read(name, field) for field in _numbers_before(node, nodes, after, fields))
    return Node(node.spec, node.stream, reads, node.unbound)


def _read(parameter: str, field: Field) -> Read:
    name, unit = f"{parameter}.{field.name}", field.unit
    return Read(name, field.name, field.stream, field.producer, unit, unit, "tensor")


def _numbers_before(
    node: Node, nodes: Sequence[Node], after: set[str], fields: FieldTable
) -> Iterator[Field]:
    producers = {other.name: other.spec for other in nodes if other.name not in {node.name, *after}}
    for field in fields[node.stream].values():
        is_of_groups = field.unit is Unit.GROUP or field.name == "group"
        producer = producers.get(field.producer)
        if field.unit not in _NUMBERS or producer is None or not is_produced_for(producer, node.spec):
            continue
        if not is_of_groups or node.spec.level is not Level.SAMPLE:
            yield field
