"""Names in the JSON rows of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hflow.planner.diff.formatting import ShownValue

Rows = Mapping[str, Any]
"""`to_json(plan)`, or the contents of a plan file."""

Subjects = dict[str, dict[str, ShownValue]]
"""Subject -> attribute -> value."""


@dataclass(frozen=True)
class Unmatched:
    """Nodes and models that only one of two plans has. Their other values are not compared."""

    nodes: frozenset[str]
    models: frozenset[str]


def node_names(rows: Rows) -> frozenset[str]:
    """Return the nodes of the graph and those that save models."""
    return frozenset(placement["node"] for placement in rows["placements"])


def model_names(rows: Rows) -> frozenset[str]:
    """Return the models of the graph."""
    return frozenset(model["name"] for model in rows["graph"]["models"])


def trained_models(rows: Rows) -> frozenset[str]:
    """Return the models in a checkpoint: those that a node writes."""
    graph = rows["graph"]
    written = {model for node in graph["nodes"] for model in node["spec"]["writes_weights"]}
    return frozenset(written | {model["name"] for model in graph["models"] if model["trainable"]})
