"""Memory formulas of the Megatron backend: 1F1B over pipeline stages, only optimizer state sharded over data.

Stage p of P has up to P - p micro-batches between their forward and backward passes (Narayanan et al. 2021,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", section 2.2).
"""

from __future__ import annotations

from collections.abc import Iterator

from hflow.planner.forecast.memory import activations
from hflow.planner.forecast.memory.parts import Items, MicroBatch, item, largest
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.shapes.layout import stage_layers
from hflow.shapes.model_shape import GATES_AND_UPS, expert_layers, mean_mlp_rows, undivided_parameters

NUM_MLP = 3
"""What an MLP keeps of gate, up, the activated gate and their product: all but the third (`layers.py`)."""

NUM_ROUTED = 1
"""Copies of hidden states that experts keep: inputs, as outputs have their weights already (`experts.py`)."""
NUM_MLP_BACKWARD = 3
"""Tensors of an MLP's rows in its backward pass: the gradients of gate and up, and the activated gate."""

FP8_LAYOUTS = 2
"""Copies of what is multiplied in FP8, of a byte a value: the backward pass sums over the other axis."""


def model_state(rank: Rank) -> Items:
    """Return weights, gradients and optimizer state.

    Weights in the compute dtype and fp32 gradients are whole on every data rank. fp32 weights (in bf16) and
    moments are sharded: 6 + 12 / d bytes a parameter in bf16. An inference replica has weights alone. Beside
    adapters, weights have neither gradients nor state. Those that are another replica's count there.
    """
    if rank.is_bare_base:
        return Items()
    num_weights = 0 if rank.replica.base_of else rank.sizes.total
    weights = item(MemoryCategory.WEIGHTS, rank.width * num_weights)
    if rank.replica.role != "train":
        return weights
    if rank.adapts:
        weights += item(MemoryCategory.WEIGHTS, rank.width * rank.trained.total, "adapters")
    masters = FP32_BYTES * rank.optimizer_share(1, 1) if rank.width < FP32_BYTES else 0
    return (
        weights
        + item(MemoryCategory.GRADIENTS, FP32_BYTES * rank.trained.total)
        + item(MemoryCategory.OPTIMIZER, masters, "fp32 weights")
        + item(MemoryCategory.OPTIMIZER, rank.optimizer_share(*rank.state_bytes))
    )


def train_step(rank: Rank, batch: MicroBatch) -> Items:
    """Return the peak of a train node beyond the model state."""
    return largest(_train_moments(rank, batch))


def infer_step(rank: Rank, batch: MicroBatch) -> Items:
    """Return the peak of an infer node beyond the model state."""
    layer = activations.layer_without_gradient(rank, batch.tokens, pads=batch.pads, repeated=batch.repeated)
    layer += activations.added_by_adapter(rank, batch.tokens, GATES_AND_UPS)
    if rank.shape.experts is not None:  # tokens as they were sent, and by expert
        layer += rank.width * rank.shape.experts.per_token * rank.shape.hidden * batch.tokens
    weights = _fp8_weights(rank, num_layers=1, num_layouts=1)
    measured = item(MemoryCategory.BUFFERS, activations.measured_matrix(rank), activations.MEASURED)
    moments = [item(MemoryCategory.ACTIVATIONS, layer) + weights + measured]
    if rank.is_last_stage:
        logits = activations.logits(rank, batch, num_tiles=1)
        moments.append(_head(rank, batch) + item(MemoryCategory.LOGITS, logits))
    return largest(moments)


def kept_after_infer(rank: Rank) -> Items:
    """Return nothing: an infer node frees what it allocates."""
    return Items()


def _train_moments(rank: Rank, batch: MicroBatch) -> Iterator[Items]:
    """Yield the bytes at each moment that may be the peak."""
    layer = activations.kept_by_layer(rank, batch, NUM_MLP, NUM_ROUTED)
    layer += activations.kept_by_adapters(rank, batch)
    layer -= _saved_by_fp8(rank, batch)
    is_recomputed = rank.config.activation_checkpointing
    recomputed = layer if is_recomputed else 0
    num_layers = activations.num_in_flight(rank, batch) * rank.sizes.num_layers
    kept = activations.kept_by_layers(rank, batch, num_layers, layer)
    in_layers = item(MemoryCategory.ACTIVATIONS, kept)
    weights = _fp8_weights(rank, 1 if is_recomputed else num_layers)
    if not is_recomputed:
        in_layers += weights
    if rank.is_last_stage:
        yield (
            in_layers
            + _head(rank, batch)
            + activations.trained_logits(rank, batch, rank.width * rank.trained.output)
        )
    needed = activations.backward_buffers(rank, batch, NUM_MLP_BACKWARD)
    needed = max(needed, activations.measured_matrix(rank))  # when the last layer's forward pass measures
    buffers = item(MemoryCategory.BUFFERS, needed, "backward buffers")
    if is_recomputed:
        buffers += weights
    yield in_layers + item(MemoryCategory.ACTIVATIONS, recomputed) + buffers
    largest_gradient = rank.width * max(rank.trained.embedding, rank.trained.output)
    yield in_layers + item(MemoryCategory.GRADIENTS, largest_gradient)
    if rank.adapts and rank.token_share > 1:
        layout = rank.replica.layout
        layers = stage_layers(rank.shape.num_layers, layout.pipe)[rank.stage]
        whole = undivided_parameters(rank.trained_shape, *layers, layout.expert)
        yield item(MemoryCategory.BUFFERS, FP32_BYTES * whole, "gradients being summed")
    step = FP32_BYTES * rank.optimizer_share(1, 1)
    updates = item(MemoryCategory.BUFFERS, rank.update_buffers, "updates of weights")
    yield item(MemoryCategory.OPTIMIZER, step, "optimizer buffers") + updates


def _saved_by_fp8(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes that a layer keeps less in FP8: inputs of products have a byte a value.

    The input of attention's output projection is kept as attention's output in any case, and that of a router
    as it was.
    """
    shape = rank.shape
    if rank.config.fp8 is None:
        return 0
    norms = 2 - expert_layers(shape, 0, shape.num_layers) / shape.num_layers
    inputs = norms * shape.hidden / rank.token_share + mean_mlp_rows(shape) / rank.tensor
    per_token = (rank.width - 1) * inputs + activations.routed_per_token(rank) * (1 - 1 / rank.width)
    return int(per_token * batch.tokens)


def _fp8_weights(rank: Rank, num_layers: int, num_layouts: int = FP8_LAYOUTS) -> Items:
    """Return the weights in FP8 that each micro-batch has for its passes through some layers."""
    if rank.config.fp8 is None:
        return Items()
    of_layer = num_layouts * rank.sizes.quantizable // rank.sizes.num_layers
    return item(MemoryCategory.BUFFERS, num_layers * of_layer, "weights in FP8")


def _head(rank: Rank, batch: MicroBatch) -> Items:
    """Return the final norm and the rows that predict learned tokens, on the last stage."""
    return item(MemoryCategory.ACTIVATIONS, activations.kept_outside_layers(rank, batch))
