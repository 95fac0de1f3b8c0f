"""The one number of a sample that a node tells the controller."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.graph.ir import Graph, Level, Node
from hflow.types import Unit

PREFERRED = ("reward", "score")


def reported_number(returns: Iterable[tuple[str, str]]) -> str | None:
    """The field `reward`, else `score`, else the first number a sample; None where there is none.

    Tensors stay on the workers; this is what a person wants to know of a sample afterwards.

    Args:
        returns: (field, unit) of each field that the body returns.
    """
    numbers = [field for field, unit in returns if unit == Unit.SEQUENCE and field != "keep"]
    return next((field for field in PREFERRED if field in numbers), next(iter(numbers), None))


def reported_field(graph: Graph, name: str) -> str | None:
    """The field that a node tells of each of its samples; None where it tells nothing.

    Sources and per-sample bodies tell the number that `reported_number` finds, whenever they fire. So do
    batch nodes whose model judges (head `score`); of others only `reward` or `score` is reported, as what
    else they give a sample, such as an advantage, is a step on the way.
    """
    node = graph.node(name)
    found = reported_number((returned.field, returned.unit) for returned in node.spec.returns)
    return found if _judges(graph, node) or (found in PREFERRED and _is_batch(node)) else None


def _judges(graph: Graph, node: Node) -> bool:
    spec = node.spec
    if spec.verb in ("encode", "generate") or (spec.runs_as_compute and spec.level is Level.SAMPLE):
        return True
    return spec.verb == "infer" and any(graph.model(model).head == "score" for model in spec.models)


def _is_batch(node: Node) -> bool:
    """Whether it returns fields of a whole batch; what a train or update node returns is no field."""
    return node.spec.level is Level.BATCH and node.spec.verb not in ("train", "update")
