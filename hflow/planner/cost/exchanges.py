"""Seconds in which tokens are sent to the ranks of their experts and back."""

from __future__ import annotations

from hflow.planner.cost.collectives import LinkTime, dispatch
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.model_shape import expert_layers
from hflow.planner.weights.sharding import stage_layers


def expert_exchange(replica: ReplicaCosts, num_tokens: float) -> LinkTime:
    """Return the time of sending tokens to the ranks of their experts and back, in one pass of a stage.

    Tokens are dispatched to the ranks of their experts, and their results return on the same ways, in every
    layer with experts. A backward pass sends gradients likewise. Source: Lepikhin et al. 2020, "GShard",
    section 3.2.

    Args:
        replica: the replica.
        num_tokens: tokens of one rank, before tensor ranks divide them.
    """
    shape, layout = replica.shape, replica.layout
    if shape.experts is None or layout.expert == 1:
        return LinkTime()
    num_layers = max(expert_layers(shape, *layers) for layers in stage_layers(shape.num_layers, layout.pipe))
    num_bytes = num_tokens / replica.token_share * shape.hidden * replica.itemsize
    one_way = dispatch(num_bytes, shape.experts.per_token, replica.expert, replica.hardware)
    return one_way.times(2 * num_layers)
