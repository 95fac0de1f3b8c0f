"""Transient bytes of the `megatron` backend: 1F1B over pipeline stages, whole weights and gradients.

Stage p of P has up to P - p micro-batches between their forward and backward passes (Narayanan et al. 2021,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from hflow.planner.memory import activations
from hflow.planner.memory.byte_counts import Items, largest
from hflow.planner.memory.microbatch import MicroBatch
from hflow.planner.memory.rank import Rank

FP32 = 4


def training(rank: Rank, batch: MicroBatch) -> Items:
    """What a train node needs at its peak beside weights, gradients and optimizer state."""
    return largest(_moments(rank, batch))


def inference(rank: Rank, batch: MicroBatch) -> Items:
    """What an infer node needs at its peak beside the weights."""
    passing = activations.passing_layer(rank, batch.tokens, pads=batch.pads)
    return largest([Items(activations=passing), _head(rank, batch, with_gradient=False)])


def _moments(rank: Rank, batch: MicroBatch) -> Iterator[Items]:
    layer = activations.kept_by_layer(rank, batch)
    kept = activations.layer_input(rank, batch) if rank.asked.recompute else layer
    again = layer if rank.asked.recompute else 0
    in_flight = min(rank.replica.layout.pipe - rank.stage, batch.num)
    in_layers = Items(activations=in_flight * rank.sizes.num_layers * kept)
    yield in_layers + _head(rank, batch, with_gradient=True)
    buffers = activations.backward_buffers(rank, batch)
    yield in_layers + Items({"activations": again, "backward buffers": buffers})
    yield in_layers + Items(gradients=rank.width * max(rank.sizes.embedding, rank.sizes.output))
    yield Items({"optimizer buffers": FP32 * -(-rank.sizes.whole // rank.data)})


def _head(rank: Rank, batch: MicroBatch, *, with_gradient: bool) -> Items:
    """The final norm, the rows that predict learned tokens and their logits, on the last stage."""
    if not rank.is_last_stage:
        return Items()
    ends = activations.kept_by_ends(rank, batch)
    return Items(activations=ends, logits=activations.logits(rank, batch, with_gradient=with_gradient))
