"""Seconds of forward and backward passes, and of the optimizer, on the heaviest rank.

What is assumed to overlap: FSDP gathers the next layer and scatters the last one's gradients while
a layer computes, so that only what exceeds the computation, or the first layer's share, is seen.
Nothing else does: tensor-parallel all-reduces, activations between stages and megatron's exchange of
gradients and weights come on top.
"""

from __future__ import annotations

import math

from hflow.planner.cost.collectives import Wire, all_gather, all_reduce, reduce_scatter, send
from hflow.planner.cost.flops import Work, layer_parameters, stage_flops, stage_parameters
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.roofline import MEMORY, Part, bound
from hflow.planner.weights.sharding import stage_layers

GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""
MIN_UNIT_BYTES = 4 << 20
"""FSDP layers below this, in fp32, are gathered together with the rest of the model."""
LOGITS_AT_ONCE = 1 << 26
"""Logits of more rows than this allows are made chunk by chunk, and again in the backward pass."""
ADAMW_BYTES = 40
"""Bytes of memory traffic for a weight that AdamW steps, all in fp32: weight and two moments read and
written, gradient read (28), and read twice and written once for its norm and clipping (12)."""
LERP_BYTES = 12
"""The same for an update of one weight by another: two read, one written."""


def forward(side: ReplicaCosts, work: Work) -> list[Part]:
    """A forward pass over one rank's samples."""
    return _walk("forward", side, work, walks=1, head_passes=1)


def train(side: ReplicaCosts, work: Work, num_updates: int) -> list[Part]:
    """Forward and backward passes with an optimizer step each.

    Args:
        side: the replica.
        work: one rank's share of one minibatch.
        num_updates: minibatches times epochs.
    """
    walks = 3 if side.asked.activation_checkpointing else 2
    head_passes = 4 if _makes_logits_twice(side, work) else 3
    once = [
        *_walk("forward and backward", side, work, walks, head_passes),
        *_exchange(side),
        *_step(side),
    ]
    return [part.times(num_updates) for part in once]


def update(side: ReplicaCosts) -> list[Part]:
    """Every weight from another one."""
    return [Part("update", local_weights(side) * LERP_BYTES / side.rates.memory, MEMORY)]


def local_weights(side: ReplicaCosts) -> float:
    """Weights of which a rank has the optimizer's state."""
    return stage_parameters(side.shape, side.layout.pipe) / side.layout.tensor / side.layout.data


def num_microbatches(side: ReplicaCosts, work: Work) -> int:
    """Micro-batches of a rank."""
    return max(1, math.ceil(work.tokens / side.asked.tokens_per_microbatch))


def _walk(name: str, side: ReplicaCosts, work: Work, walks: int, head_passes: int) -> list[Part]:
    """Micro-batches go through the layers.

    Args:
        name: of the computation.
        side: the replica.
        work: one rank's samples.
        walks: times that a micro-batch goes through a layer: forward, back, and forward again where
            activations are recomputed. The way back costs as much as two forward passes.
        head_passes: forward passes that the work of the output matrix amounts to.
    """
    num, layer_passes = num_microbatches(side, work), walks + (walks > 1)
    flops = stage_flops(side.shape, work, side.layout.pipe, layer_passes, head_passes)
    weights = num * layer_passes * _stage_bytes(side)
    computing = bound(name, flops / side.layout.tensor, weights, side.rates, num * walks * side.host_seconds)
    reducing = _tensor_wire(side, work, num, walks)
    handing = _stage_wire(side, work, num, walks)
    busy = computing.seconds + reducing.seconds + handing.seconds
    return [
        computing,
        reducing.part("tensor all-reduce"),
        handing.part("between stages"),
        Part("pipeline bubble", bubble(side.layout.pipe, num) * busy, computing.limit),
        *_gathers(side, num, walks, computing.seconds),
    ]


def bubble(num_stages: int, num_microbatches: int) -> float:
    """Idle time over busy time of one-forward-one-backward pipelining: `(p - 1) / m`.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters", 2.2.
    """
    return (num_stages - 1) / num_microbatches


def _tensor_wire(side: ReplicaCosts, work: Work, num: int, walks: int) -> Wire:
    """Two all-reduces of the hidden states in a layer, each time."""
    if side.layout.tensor == 1:
        return Wire()
    first, last = stage_layers(side.shape.num_layers, side.layout.pipe)[0]
    message = work.rows / num * side.shape.hidden * side.itemsize
    return all_reduce(message, side.tensor, side.hardware).times(num * walks * 2 * (last - first))


def _stage_wire(side: ReplicaCosts, work: Work, num: int, walks: int) -> Wire:
    """Hidden states to the next stage, and their gradients back."""
    if side.layout.pipe == 1:
        return Wire()
    message = work.rows / num * side.shape.hidden * side.itemsize / side.token_share
    return send(message, side.stage_link, side.hardware).times(num * min(walks, 2))


def _gathers(side: ReplicaCosts, num: int, walks: int, computing: float) -> list[Part]:
    """What is seen of FSDP's collectives: whole weights on both ways, gradients scattered on the way back.

    Recomputing uses the weights that are gathered for the way back.
    """
    if side.backend.sharded_over_data != "everything" or side.layout.data == 1:
        return []
    units = _num_units(side)
    numel = stage_parameters(side.shape, side.layout.pipe) / side.layout.tensor / units
    gather = all_gather(numel * side.itemsize, side.data, side.hardware).times(num * units * min(walks, 2))
    scatter = reduce_scatter(numel * GRADIENT_BYTES, side.data, side.hardware)
    scatter = scatter.times(num * units if walks > 1 else 0)
    total = gather.seconds + scatter.seconds
    hidden = (units - 1) / units
    seen = max(total * (1 - hidden), total - computing * hidden) / total
    return [gather.times(seen).part("all-gather"), scatter.times(seen).part("reduce-scatter")]


def _num_units(side: ReplicaCosts) -> int:
    """Parts that FSDP gathers one after the other."""
    is_unit = layer_parameters(side.shape) * GRADIENT_BYTES >= MIN_UNIT_BYTES
    return 1 + side.shape.num_layers // side.layout.pipe if is_unit else 1


def _exchange(side: ReplicaCosts) -> list[Part]:
    """A distributed optimizer's: gradients scattered to its shards, new weights gathered from them."""
    if side.backend.sharded_over_data != "optimizer" or side.layout.data == 1:
        return []
    numel = stage_parameters(side.shape, side.layout.pipe) / side.layout.tensor
    return [
        reduce_scatter(numel * GRADIENT_BYTES, side.data, side.hardware).part("reduce-scatter"),
        all_gather(numel * side.itemsize, side.data, side.hardware).part("all-gather"),
    ]


def _step(side: ReplicaCosts) -> list[Part]:
    norm = all_reduce(GRADIENT_BYTES, side.data, side.hardware)
    stepping = local_weights(side) * ADAMW_BYTES / side.rates.memory
    return [norm.part("gradient norm"), Part("optimizer", stepping, MEMORY)]


def _makes_logits_twice(side: ReplicaCosts, work: Work) -> bool:
    learned = work.learned / num_microbatches(side, work)
    return side.shape.head == "lm" and learned * side.shape.vocab / side.layout.tensor > LOGITS_AT_ONCE


def _stage_bytes(side: ReplicaCosts) -> float:
    """Bytes of the weights that one pass of a rank reads."""
    return stage_parameters(side.shape, side.layout.pipe) / side.layout.tensor * side.itemsize
