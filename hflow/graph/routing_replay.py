"""Routing replay: nodes compute with the experts that the engine chose for each token.

Rollout Routing Replay (Ma et al. 2025, arXiv:2510.11370). The option `routing_replay` of a generate node adds
the field `routed_experts` to its stream. Every train and infer node that runs the generating model on this
stream reads it, without its body.
"""

from __future__ import annotations

from hflow.graph.errors import recipe_error
from hflow.graph.ir import Graph, NodeSpec, Parameter, RecipeSpec
from hflow.graph.streams import StreamAssignment
from hflow.types import Unit
from hflow.types.routed_experts import ROUTED_EXPERTS

OPTION = "routing_replay"


def records_experts(spec: RecipeSpec, source: str) -> bool:
    """Return whether the source of a stream records experts."""
    return any(node.name == source and node.option(OPTION, False) for node in spec.nodes)


def replay_parameters(
    node: NodeSpec, spec: RecipeSpec, assignment: StreamAssignment
) -> tuple[Parameter, ...]:
    """Return the parameter with which a train or infer node reads its model's experts, if it replays them."""
    source = assignment.stream(assignment.stream_of[node.name]).source
    if node.verb not in ("train", "infer") or not records_experts(spec, source):
        return ()
    generates = next(other for other in spec.nodes if other.name == source)
    if not {*node.models} & {*generates.models}:
        return ()
    return (Parameter(f"@{ROUTED_EXPERTS}", ROUTED_EXPERTS, Unit.TOKEN, "tensor"),)


def check_routing_replay(graph: Graph) -> None:
    """Check that each generate node that records experts has one model, and that a node reads them.

    Raises:
        RecipeError: if not.
    """
    read = {read.producer for node in graph.nodes for read in node.reads if read.field == ROUTED_EXPERTS}
    for node in graph.nodes:
        if not node.spec.option(OPTION, False):
            continue
        first, *others = node.spec.models
        if others:
            problem = f"{OPTION} is for episodes of one model, but it has {first}, {', '.join(others)}"
        elif node.name not in read:
            problem = f"{OPTION} has no effect, as no node trains {first!r} or infers with it on its samples"
        else:
            continue
        raise recipe_error(node.spec.where, node.name, f"{problem}. Remove {OPTION}")
