"""Every field of a recipe, by stream: who makes it and in which unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.errors import RecipeError
from hflow.graph.errors import recipe_error
from hflow.graph.ir import TRAJECTORY_FIELDS, NodeSpec, RecipeSpec, Stream
from hflow.graph.streams import StreamAssignment, dataset_columns
from hflow.types import Unit

UNIT_NAMES: Mapping[Unit, str] = {
    Unit.TOKEN: "PerToken",
    Unit.SEQUENCE: "PerSequence",
    Unit.GROUP: "PerGroup",
    Unit.TEXT: "Text",
    Unit.JSON: "Json",
}
"""Units as recipes write them."""


@dataclass(frozen=True)
class Field:
    """A field of one stream."""

    name: str
    stream: str
    producer: str
    unit: Unit
    scalar: str = ""
    """Type that its body returns; empty for columns and trajectory fields."""


Fields = Mapping[str, Mapping[str, Field]]
"""stream -> name -> field."""


def build_field_table(spec: RecipeSpec, assignment: StreamAssignment) -> Fields:
    """All fields of all streams.

    Raises:
        RecipeError: when two nodes make one field in a stream, or one makes a column or a
            trajectory's field again.
    """
    fields = {stream.name: _carried(spec, stream) for stream in assignment.streams}
    for node in spec.nodes:
        if node.verb == "train":
            continue
        for stream in assignment.output_streams[node.name]:
            for result in node.returns:
                _check_new(spec, node, result.field, fields[stream])
                made = Field(result.field, stream, node.name, result.unit, result.scalar)
                fields[stream][result.field] = made
    return fields


def column_fields(spec: RecipeSpec, stream: Stream) -> dict[str, Field]:
    """The dataset's columns on a root stream; nothing on a derived one."""
    if stream.dataset is None:
        return {}
    columns = dataset_columns(spec, stream.dataset)
    return {name: Field(name, stream.name, stream.source, unit) for name, unit in columns.items()}


def _carried(spec: RecipeSpec, stream: Stream) -> dict[str, Field]:
    """What a stream has from its source: columns and the trajectory."""
    columns = column_fields(spec, stream)
    for name in columns:
        if name in TRAJECTORY_FIELDS:
            where = next(d.where for d in spec.datasets if d.name == stream.dataset)
            raise RecipeError(f"{where}: column {name!r} has the name of a trajectory's field; rename it")
    made = {name: Field(name, stream.name, stream.source, unit) for name, unit in TRAJECTORY_FIELDS.items()}
    return {**columns, **made}


def _check_new(spec: RecipeSpec, node: NodeSpec, name: str, fields: Mapping[str, Field]) -> None:
    other = fields.get(name)
    if other is None:
        return
    maker = next(n for n in spec.nodes if n.name == other.producer)
    by = f"{maker.name} at {maker.where}" if other.scalar else f"the dataset or {maker.name}'s trajectory"
    raise recipe_error(
        node.where, node.name, f"field {name!r} of stream {other.stream!r} is already made by {by}"
    )
