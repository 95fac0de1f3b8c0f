"""Bytes of a field's values as they travel between stores, by its unit and type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hflow.graph.ir import TRAJECTORY_FIELDS, Graph
from hflow.types import Unit

TEXT_BYTES = 4
"""Bytes of UTF-8 that a token stands for, in round figures (English text)."""
JSON_BYTES = 64
"""Bytes of a JSON value that grows with no text, and of what surrounds the texts in messages."""


@dataclass(frozen=True)
class FieldSize:
    """Bytes of one sample's value: a constant, and so many for each token."""

    constant: int = 0
    a_token: int = 0
    """For each token of the sample."""
    a_prompt_token: int = 0
    a_response_token: int = 0

    def of(self, prompt: int, response: int) -> int:
        """Bytes for a sample of these token counts."""
        a_prompt, a_response = self.a_token + self.a_prompt_token, self.a_token + self.a_response_token
        return self.constant + a_prompt * prompt + a_response * response


_TRAJECTORY: Mapping[str, FieldSize] = {
    "input_ids": FieldSize(a_token=8),
    "loss_mask": FieldSize(a_token=1),
    "behav_logprobs": FieldSize(a_token=4),
    "versions": FieldSize(a_token=8),
    "completion": FieldSize(a_response_token=TEXT_BYTES),
    "messages": FieldSize(constant=JSON_BYTES, a_token=TEXT_BYTES),
    "stop_reason": FieldSize(constant=len("length")),
    "num_tokens": FieldSize(constant=8),
    "num_turns": FieldSize(constant=8),
    "group": FieldSize(constant=8),
}
"""The dtypes that workers pack trajectories in: int64, bool, float32."""

_COLUMN: Mapping[Unit, FieldSize] = {
    Unit.TOKEN: FieldSize(a_token=8),
    Unit.SEQUENCE: FieldSize(constant=8),
    Unit.GROUP: FieldSize(constant=8),
    Unit.TEXT: FieldSize(a_prompt_token=TEXT_BYTES),
    Unit.JSON: FieldSize(constant=JSON_BYTES, a_prompt_token=TEXT_BYTES),
}
"""A dataset's columns: its numbers may be integers, which stay 64 bits wide."""

_NUMBER_BYTES: Mapping[str, int] = {"bool": 1, "int": 8}
"""By the type that a body returns; floats and tensors travel as float32."""


def field_size(graph: Graph, name: str) -> FieldSize:
    """The size of a `stream/field`: of a trajectory, of the dataset, or made by a node."""
    stream_name, _, field = name.partition("/")
    for node in graph.nodes:
        for returned in node.spec.returns:
            if node.stream == stream_name and returned.field == field:
                return _made(returned.unit, returned.scalar)
    if field in TRAJECTORY_FIELDS:
        return _TRAJECTORY[field]
    dataset = graph.stream(stream_name).dataset
    columns = next((dict(known.columns) for known in graph.datasets if known.name == dataset), {})
    return _COLUMN[columns[field]]


def _made(unit: Unit, scalar: str) -> FieldSize:
    """The size of what a body returns; a group's value travels with each of its members."""
    if unit is Unit.TEXT:
        return FieldSize(a_response_token=TEXT_BYTES)
    if unit is Unit.JSON:
        return FieldSize(constant=JSON_BYTES)
    width = _NUMBER_BYTES.get(scalar.removeprefix("list[").removesuffix("]"), 4)
    return FieldSize(a_token=width) if unit is Unit.TOKEN else FieldSize(constant=width)
