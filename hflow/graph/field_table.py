"""The table of all fields of a recipe: for each stream, the producer and unit of each field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hflow.base.errors import RecipeError
from hflow.graph.errors import recipe_error
from hflow.graph.ir import TRAJECTORY_FIELDS, NodeSpec, RecipeSpec, Stream
from hflow.graph.model import Model
from hflow.graph.streams import StreamAssignment, dataset_columns
from hflow.types import Unit
from hflow.types.recorded import requested_kinds
from hflow.types.trajectory import PIXELS

UNIT_NAMES: Mapping[Unit, str] = {
    Unit.TOKEN: "PerToken",
    Unit.SEQUENCE: "PerSequence",
    Unit.GROUP: "PerGroup",
    Unit.TEXT: "Text",
    Unit.MESSAGES: "Messages",
    Unit.JSON: "Json",
    Unit.IMAGE: "Image",
    Unit.IMAGES: "list[Image]",
    Unit.PIXELS: "pixels",
}
"""Units as recipes write them."""


@dataclass(frozen=True)
class Field:
    """One field of one stream."""

    name: str
    stream: str
    producer: str
    unit: Unit
    scalar: str = ""
    """The type that its body returns; empty for dataset columns and fields of the trajectory."""


FieldTable = Mapping[str, Mapping[str, Field]]
"""Stream -> name -> field."""


def build_field_table(spec: RecipeSpec, assignment: StreamAssignment) -> FieldTable:
    """Return the fields of all streams.

    Raises:
        RecipeError: if a field of a stream has two producers, counting dataset columns and the trajectory.
    """
    fields = {stream.name: _source_fields(spec, stream) for stream in assignment.streams}
    for node in spec.nodes:
        if node.verb == "train":
            continue
        for stream in assignment.output_streams[node.name]:
            for result in node.returns:
                _check_new(spec, node, result.field, fields[stream])
                field = Field(result.field, stream, node.name, result.unit, result.scalar)
                fields[stream][result.field] = field
    return fields


def column_fields(spec: RecipeSpec, stream: Stream) -> dict[str, Field]:
    """Return the dataset columns of a stream; none if it derives from another stream."""
    if stream.dataset is None:
        return {}
    columns = dataset_columns(spec, stream.dataset)
    return {name: Field(name, stream.name, stream.source, unit) for name, unit in columns.items()}


def _source_fields(spec: RecipeSpec, stream: Stream) -> dict[str, Field]:
    """Return the fields that come from a stream's source: dataset columns and the trajectory's fields."""
    columns = column_fields(spec, stream)
    source = next(node for node in spec.nodes if node.name == stream.source)
    units = {**TRAJECTORY_FIELDS, **{kind.name: kind.unit for kind in requested_kinds(dict(source.options))}}
    for name in columns:
        if name in units:
            where = next(d.where for d in spec.datasets if d.name == stream.dataset)
            raise RecipeError(
                f"{where}: column {name!r} has the name of a trajectory field. Rename the column"
            )
    if sees(spec.models, source):
        units[PIXELS] = Unit.PIXELS
    trajectory = {name: Field(name, stream.name, stream.source, unit) for name, unit in units.items()}
    return {**columns, **trajectory}


def sees(models: Sequence[Model], source: NodeSpec) -> bool:
    """Return whether the trajectories of a generate or encode node have images, as its model sees."""
    return any(model.vision for model in models if model.name in source.models[:1])


def _check_new(spec: RecipeSpec, node: NodeSpec, name: str, fields: Mapping[str, Field]) -> None:
    other = fields.get(name)
    if other is None:
        return
    producer = next(n for n in spec.nodes if n.name == other.producer)
    shown = (
        f"{producer.name} at {producer.where}"
        if other.scalar
        else f"the dataset or the trajectory of {producer.name}"
    )
    problem = f"{shown} already produces field {name!r} of stream {other.stream!r}. Rename one with returns="
    raise recipe_error(node.where, node.name, problem)
