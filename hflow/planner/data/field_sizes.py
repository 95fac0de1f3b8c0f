"""The bytes of a field's values when they move between stores, by unit and type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.graph.ir import TRAJECTORY_FIELDS, Graph
from hflow.planner.model_shape import ModelShape, routing_format
from hflow.types import Unit
from hflow.types.routed_experts import ROUTED_EXPERTS

TEXT_BYTES = 4
"""Approximate bytes of UTF-8 per token (English text)."""
JSON_BYTES = 64
"""Approximate bytes of a JSON value without text, and of the JSON around the texts in messages."""


@dataclass(frozen=True)
class FieldSize:
    """Bytes of one sample's value: a constant, and a number of bytes per token."""

    constant: int = 0
    per_token: int = 0
    """Bytes for each token of the sample."""
    per_prompt_token: int = 0
    per_response_token: int = 0

    def of(self, prompt: int, response: int) -> int:
        """Return the bytes for a sample with these numbers of tokens."""
        per_prompt = self.per_token + self.per_prompt_token
        per_response = self.per_token + self.per_response_token
        return self.constant + per_prompt * prompt + per_response * response


_TRAJECTORY: Mapping[str, FieldSize] = {
    "input_ids": FieldSize(per_token=8),
    "loss_mask": FieldSize(per_token=1),
    "behav_logprobs": FieldSize(per_token=4),
    "versions": FieldSize(per_token=8),
    "completion": FieldSize(per_response_token=TEXT_BYTES),
    "messages": FieldSize(constant=JSON_BYTES, per_token=TEXT_BYTES),
    "stop_reason": FieldSize(constant=len("length")),
    "num_tokens": FieldSize(constant=8),
    "num_turns": FieldSize(constant=8),
    "group": FieldSize(constant=8),
}
"""Workers pack trajectories as int64, bool and float32."""

_COLUMN: Mapping[Unit, FieldSize] = {
    Unit.TOKEN: FieldSize(per_token=8),
    Unit.SEQUENCE: FieldSize(constant=8),
    Unit.GROUP: FieldSize(constant=8),
    Unit.TEXT: FieldSize(per_prompt_token=TEXT_BYTES),
    Unit.MESSAGES: FieldSize(constant=JSON_BYTES, per_prompt_token=TEXT_BYTES),
    Unit.JSON: FieldSize(constant=JSON_BYTES, per_prompt_token=TEXT_BYTES),
}
"""Columns of a dataset: their numbers may be integers, which stay 64 bits wide."""

_NUMBER_BYTES: Mapping[str, int] = {"bool": 1, "int": 8, "float": 8}
"""Bytes by the type that a body returns; tensors are stored as float32."""


def field_size(graph: Graph, name: str, shapes: Mapping[str, ModelShape]) -> FieldSize:
    """Return the size of a `stream/field`, which a node returns or a trajectory or the dataset has.

    Args:
        graph: of the recipe.
        name: of the field.
        shapes: model -> its sizes, as far as they are known.
    """
    stream_name, _, field = name.partition("/")
    if field == ROUTED_EXPERTS:
        return _routing_size(graph, stream_name, shapes)
    for node in graph.nodes:
        for returned in node.spec.returns:
            if node.stream == stream_name and returned.field == field:
                return _returned_size(returned.unit, returned.scalar)
    if field in TRAJECTORY_FIELDS:
        return _TRAJECTORY[field]
    dataset = graph.stream(stream_name).dataset
    columns = next((dict(known.columns) for known in graph.datasets if known.name == dataset), {})
    return _COLUMN[columns[field]]


def _routing_size(graph: Graph, stream: str, shapes: Mapping[str, ModelShape]) -> FieldSize:
    """Return the size of the experts that computed the tokens of a stream."""
    (model,) = graph.node(graph.stream(stream).source).spec.models
    form = routing_format(shapes[model]) if model in shapes else None
    return FieldSize(per_token=0 if form is None else form.num_bytes)


def _returned_size(unit: Unit, scalar: str) -> FieldSize:
    """Return the size of what a body returns; each sample of a group has its own copy of a group's value."""
    if unit is Unit.TEXT:
        return FieldSize(per_response_token=TEXT_BYTES)
    if unit in (Unit.MESSAGES, Unit.JSON):
        return FieldSize(constant=JSON_BYTES)
    width = _NUMBER_BYTES.get(scalar.removeprefix("list[").removesuffix("]"), 4)
    return FieldSize(per_token=width) if unit is Unit.TOKEN else FieldSize(constant=width)
