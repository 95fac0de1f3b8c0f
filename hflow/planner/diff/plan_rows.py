"""A plan's JSON rows as they are compared: the words for them, and the names in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hflow.planner.diff.formatting import Fact

Rows = Mapping[str, Any]
"""`to_json(plan)`, or what a plan file holds."""

Subjects = dict[str, dict[str, Fact]]
"""Subject -> attribute -> fact."""


@dataclass(frozen=True)
class Lone:
    """Nodes and models that only one of two plans has: what else is said of them goes without saying."""

    nodes: frozenset[str]
    models: frozenset[str]


def node_names(rows: Rows) -> frozenset[str]:
    """Nodes of the graph, and those that save models."""
    return frozenset(placement["node"] for placement in rows["placements"])


def model_names(rows: Rows) -> frozenset[str]:
    """Models of the graph."""
    return frozenset(model["name"] for model in rows["graph"]["models"])


def trained_models(rows: Rows) -> frozenset[str]:
    """Models whose weights a checkpoint holds: those that a node writes."""
    graph = rows["graph"]
    written = {model for node in graph["nodes"] for model in node["spec"]["writes_weights"]}
    return frozenset(written | {model["name"] for model in graph["models"] if model["trainable"]})
