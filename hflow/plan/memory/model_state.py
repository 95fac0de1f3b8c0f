"""What a replica keeps on its devices between phases: weights, optimizer state, gradients."""

from __future__ import annotations

from hflow.plan.memory.items import Items
from hflow.plan.memory.rank import Rank

FP32 = 4
NUM_MOMENTS = 2
"""AdamW keeps the running means of the gradient and of its square, in fp32."""


def model_state(rank: Rank) -> Items:
    """Bytes that a rank of a training engine keeps.

    torch: fp32 weights and moments, sharded over data; gradients live within a step only. Sixteen bytes a
    trained parameter over the ranks, with the gradients. megatron: weights in the compute dtype and fp32
    gradients whole; fp32 weights (in bf16) and moments sharded: 6 + 12 / d bytes in bf16. An inference
    replica has weights alone.
    """
    facts, sizes = rank.facts, rank.sizes
    is_trained = rank.replica.role == "train"
    if facts.over_data == "everything":
        moments = NUM_MOMENTS * FP32 * sizes.shard if is_trained else 0
        return Items(weights=FP32 * sizes.shard) + Items(optimizer=moments)
    weights = Items(weights=rank.width * sizes.whole)
    if not is_trained:
        return weights
    num_copies = NUM_MOMENTS + (1 if facts.keeps_cast and rank.width < FP32 else 0)
    optimizer = -(-num_copies * FP32 * sizes.whole // rank.data)
    return weights + Items(gradients=FP32 * sizes.whole, optimizer=optimizer)
