"""The one number per sample that a node reports to the controller."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.graph.ir import Graph, Level, Node
from hflow.types import Unit

PREFERRED = ("reward", "score")


def reported_field(graph: Graph, name: str) -> str | None:
    """Return the field that a node reports of each of its samples, or None.

    Sources and per-sample bodies report the number that `reported_number` chooses, at whatever level they
    fire. So do batch nodes whose model judges (head `score`). Other batch nodes report only `reward` or
    `score`: anything else they return, such as an advantage, is an intermediate result.
    """
    node = graph.node(name)
    field = reported_number((returned.field, returned.unit) for returned in node.spec.returns)
    return field if _judges(graph, node) or (field in PREFERRED and _returns_batch_fields(node)) else None


def reported_number(returns: Iterable[tuple[str, str]]) -> str | None:
    """Return the field `reward`, else `score`, else the first number per sample; None if there is none.

    Tensors stay on the workers; this number is what a person wants to know of a sample afterwards.

    Args:
        returns: (field, unit) of each field that the body returns.
    """
    numbers = [field for field, unit in returns if unit == Unit.SEQUENCE and field != "keep"]
    return next((field for field in PREFERRED if field in numbers), next(iter(numbers), None))


def _judges(graph: Graph, node: Node) -> bool:
    spec = node.spec
    if spec.verb in ("encode", "generate") or (spec.verb == "compute" and spec.level is Level.SAMPLE):
        return True
    return spec.verb == "infer" and any(graph.model(model).head == "score" for model in spec.models)


def _returns_batch_fields(node: Node) -> bool:
    """Return whether a node returns fields of a whole batch; train and update nodes return no fields."""
    return node.spec.level is Level.BATCH and node.spec.verb not in ("train", "update")
