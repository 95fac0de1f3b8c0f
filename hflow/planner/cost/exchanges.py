"""Seconds of what context and expert parallelism exchange."""

from __future__ import annotations

from collections.abc import Callable

from hflow.planner.cost.collectives import LinkTime, RankPlacement, all_gather, dispatch
from hflow.planner.cost.flops import Work, stage_parameters
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.hardware import Hardware
from hflow.planner.model_shape import expert_layers
from hflow.planner.weights.sharding import stage_layers


def context_exchange(replica: ReplicaCosts, work: Work, num: int, num_passes: int) -> LinkTime:
    """Return the time of gathering keys and values on the ranks that divide each sequence.

    A forward pass gathers those of the whole sequence, and a backward pass scatters the sums of their
    gradients, which moves as many bytes. Source: Grattafiori et al. 2024, "The Llama 3 herd of models",
    section 3.3.2.

    Args:
        replica: the replica.
        work: one rank's samples.
        num: micro-batches.
        num_passes: passes of a micro-batch through a layer.
    """
    shape, layout = replica.shape, replica.layout
    if layout.context == 1:
        return LinkTime()
    first, last = stage_layers(shape.num_layers, layout.pipe)[0]
    entries = 2 * max(shape.num_kv_heads, layout.tensor) * shape.head_dim / layout.tensor
    sequence = work.rows / num * layout.context * entries * replica.itemsize
    return all_gather(sequence, replica.context, replica.hardware).times(num * num_passes * (last - first))


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


Collective = Callable[[float, RankPlacement, Hardware], LinkTime]


def over_copies(collective: Collective, replica: ReplicaCosts, width: float) -> LinkTime:
    """Return the time of a collective on all weights of a rank, over the ranks that have the same ones.

    Args:
        collective: such as `all_gather`.
        replica: the replica.
        width: bytes for each weight.
    """
    layout, hardware = replica.layout, replica.hardware
    others = stage_parameters(replica.shape, layout.pipe, 0) / layout.tensor
    time = collective(others * width, replica.data, hardware)
    if replica.stage_weights > others:
        time += collective((replica.stage_weights - others) * width, replica.expert_data, hardware)
    return time
