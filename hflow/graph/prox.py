"""Where `prox_logprobs` come from: `@train(prox=...)` alone decides (rule 8 of the language).

`recompute` and `metrics` take them from an infer node (`actor_inf`) on the train node's model,
`loglinear` lets the train node make them on its way, `none` reads `behav_logprobs` in their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hflow.graph.errors import recipe_error
from hflow.graph.ir import Node, NodeSpec, Parameter, RecipeSpec
from hflow.graph.streams import StreamAssignment
from hflow.types import Unit

FIELD = "prox_logprobs"
_APPROXIMATES = ("loglinear", "metrics")


def resolve_prox(spec: RecipeSpec, assignment: StreamAssignment) -> RecipeSpec:
    """Drop implied `actor_inf`s where one is listed, and bind `prox="none"` to `behav_logprobs`."""
    listed = {
        assignment.stream_of[node.name] for node in spec.nodes if _makes_prox(node) and not node.implicit
    }
    kept = [node for node in spec.nodes if not (node.implicit and assignment.stream_of[node.name] in listed)]
    return replace(spec, nodes=tuple(_resolve(node) for node in kept))


def makes_own_prox(node: NodeSpec, parameter: Parameter) -> bool:
    """Whether the train node itself computes this parameter."""
    return parameter.field == FIELD and node.verb == "train" and node.option("prox") == "loglinear"


def framework_parameters(node: NodeSpec) -> tuple[Parameter, ...]:
    """Fields that the framework reads for a train node and the body is not given."""
    if node.verb != "train":
        return ()
    wanted = []
    if node.option("mask") is not None:
        wanted.append(Parameter("@mask", node.option("mask"), Unit.TOKEN, "tensor"))
    if node.option("prox") in _APPROXIMATES:
        wanted += [
            Parameter(f"@{field}", field, Unit.TOKEN, "tensor") for field in ("behav_logprobs", "versions")
        ]
    return tuple(wanted)


def unread_prox(nodes: Sequence[Node]) -> Iterator[Node]:
    """Infer nodes that make nothing but prox_logprobs which nobody reads."""
    for node in nodes:
        only_prox = node.spec.verb == "infer" and [r.field for r in node.spec.returns] == [FIELD]
        if only_prox and not any(read.producer == node.name for other in nodes for read in other.reads):
            yield node


def check_prox(spec: RecipeSpec, assignment: StreamAssignment) -> None:
    """Refuse what contradicts `prox=`: other makers, other models, readers that mean otherwise.

    Raises:
        RecipeError: for the first contradiction.
    """
    for train in spec.nodes:
        if train.verb == "train" and any(parameter.name == FIELD for parameter in train.parameters):
            same = [n for n in spec.nodes if assignment.stream_of[n.name] == assignment.stream_of[train.name]]
            for node in same:
                _check_maker(node, train)
                _check_reader(node, train)


def _resolve(node: NodeSpec) -> NodeSpec:
    if node.verb != "train" or node.option("prox") != "none":
        return node
    bound = (replace(p, field="behav_logprobs") if p.field == FIELD else p for p in node.parameters)
    return replace(node, parameters=tuple(bound))


def _makes_prox(node: NodeSpec) -> bool:
    return any(result.field == FIELD for result in node.returns)


def _check_maker(node: NodeSpec, train: NodeSpec) -> None:
    if not _makes_prox(node):
        return
    mode = train.option("prox")
    if node.verb != "infer":
        raise recipe_error(
            node.where,
            node.name,
            f"it makes {FIELD}, but prox={mode!r} of {train.name} alone decides where they come from: "
            f"name the field otherwise",
        )
    if node.models != train.models:
        raise recipe_error(
            node.where,
            node.name,
            f"it makes {FIELD} with model {node.models[0]!r}, but {train.name} on the same stream trains "
            f"{train.models[0]!r}",
        )


def _check_reader(node: NodeSpec, train: NodeSpec) -> None:
    mode = train.option("prox")
    if node.verb == "train" or mode not in ("none", "loglinear"):
        return
    for parameter in node.parameters:
        if parameter.field == FIELD:
            raise recipe_error(
                node.where,
                node.name,
                f"it reads {FIELD}, but {train.name} has prox={mode!r}, so there are none here: "
                f"set prox='recompute' there or read 'behav_logprobs'",
                parameter.name,
            )
