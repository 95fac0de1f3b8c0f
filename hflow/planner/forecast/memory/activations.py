"""Bytes of activations: what autograd keeps of a decoder layer, and what exists while one is computed.

T tokens, D hidden, F intermediate, H heads, K key-value heads, E head size. A norm computes in fp32 in every
precision, and attention keeps no scores (flash kernels). The division over tensor ranks follows Korthikanti
et al. 2022, "Reducing activation recomputation in large transformer models", section 4: tensor ranks divide
the rows of F and of heads. They divide the rows of D only with sequence parallelism.
"""

from __future__ import annotations

from functools import lru_cache

from hflow.planner.forecast.memory.parts import Items, MicroBatch, item, largest
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank
from hflow.planner.plan.forecast import MemoryCategory
from hflow.shapes.architectures import ROUTERS
from hflow.shapes.model_shape import (
    NF4_BLOCK,
    ModelShape,
    adapter_widths,
    expert_layers,
    layer_template,
    mean_mlp_rows,
    measured_matrices,
    mlp_rows,
)

SLOTS_PER_TOKEN = 8 / 7
"""Padded slots per token where lengths differ: the sequences of a bucket have 3/4 to 1 of its width, 7/8 on
average (`models/packed_attention.py`)."""
CHUNK_BYTES, LOGITS_PER_TILE = 1 << 29, 1 << 22
"""Bytes of the logits that exist at once on a rank, and how many of them exist in fp32
(`training/loop/logprobs.py`)."""
BYTES_OF_REPEATED = 64
"""Bytes of a repeated token's place in the sequences, in the tables of rows, and in what a body reads."""
NUM_COPIED = 2
"""Inputs of layers, besides that of the one that computes, which are on their way to the host
(`models/host_offload.py`)."""

MEASURED = "matrix whose rows are measured"
"""The memory item of what `measured_matrix` returns."""


def kept_by_layer(rank: Rank, batch: MicroBatch, num_mlp: int = 4, num_routed: int = 2) -> int:
    """Return the bytes that autograd keeps of one decoder layer until its backward pass.

    `num_mlp` is as in `kept_per_token`, and `num_routed` the copies of hidden states that experts keep: of
    their inputs, and of their outputs where these are weighted.
    """
    hidden_rows, split_rows = kept_per_token(rank, pads=batch.pads, num_mlp=num_mlp)
    routed = num_routed * routed_per_token(rank)
    per_token = hidden_rows / rank.token_share + split_rows / rank.tensor + routed
    return round(per_token * batch.tokens) + repeated_keys(rank, batch) + window_mask(rank, batch)


def window_mask(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes of the mask that a layer with a window keeps, as the mean over layers.

    It is that of the longest sequences. A kernel that takes the width of the window needs none.
    """
    shape, window = rank.shape, rank.shape.window
    takes_width = rank.has_varlen_kernel or (shape.has_sinks and not rank.on_cpu)
    if window is None or window.tokens >= batch.longest or takes_width:
        return 0
    num_windowed = shape.num_layers - shape.num_layers // window.full_every
    return rank.width * batch.longest**2 * num_windowed // shape.num_layers


def repeated_keys(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes of a layer's keys and values of shared prompts, for the other samples behind them."""
    slots = SLOTS_PER_TOKEN if batch.pads and not rank.has_varlen_kernel else 1
    size = rank.key_copies * rank.key_value_size / rank.tensor
    return round(slots * 2 * rank.width * size * batch.repeated)


def kept_by_adapters(rank: Rank, batch: MicroBatch) -> int:
    """Return the activations of a layer's adapters: r numbers a token, between the two matrices.

    With DoRA also outputs before their magnitudes are multiplied.
    """
    if rank.config.lora is None:
        return 0
    sizes = adapter_widths(rank.trained_shape)
    whole = sizes.magnitudes - sizes.split_magnitudes
    outputs = whole / rank.token_share + sizes.split_magnitudes / rank.tensor
    return round(rank.width * (sizes.low + outputs) * batch.tokens)


def added_by_adapter(rank: Rank, tokens: int, *targets: str) -> int:
    """Return the bytes of what an adapter of the MLP's first matrices, `targets`, adds beside the sum."""
    adapter = rank.trained_shape.adapter
    if adapter is None or not set(targets).intersection(adapter.targets):
        return 0
    return rank.width * _most_mlp_rows(rank.shape) // rank.tensor * tokens


def measured_matrix(rank: Rank) -> int:
    """Return the bytes of the largest matrix whose rows DoRA measures, with its adapter; 0 without DoRA."""
    if rank.config.lora is None or not rank.config.lora.dora:
        return 0
    return rank.width * max(measured_matrices(rank.trained_shape)) // rank.tensor


def whole_matrix(rank: Rank) -> int:
    """Return the bytes of the largest matrix in 4 bits while it is whole, with its factors; 0 without any."""
    if not rank.rounds_base:
        return 0
    largest_one = max(spec.numel for spec in layer_template(rank.shape) if spec.is_quantizable)
    return rank.width * largest_one + FP32_BYTES * -(-largest_one // NF4_BLOCK)


def routed_per_token(rank: Rank) -> float:
    """Return the bytes per token of the inputs of experts, which autograd keeps, as the mean over layers.

    Each token is copied to every expert that it passes. All tensor ranks have the whole copies.
    """
    shape, experts = rank.shape, rank.shape.experts
    if experts is None:
        return 0.0
    num_layers = expert_layers(shape, 0, shape.num_layers)
    return rank.width * shape.hidden * experts.per_token * num_layers / shape.num_layers


def kept_per_token(rank: Rank, *, pads: bool, num_mlp: int = 4) -> tuple[int, float]:
    """Return the bytes per token that a layer keeps: of rows of D, and of rows that tensor ranks divide.

    A norm keeps its input, the normalised rows and its output (in bf16 the input as fp32). Attention keeps q,
    k, v (those of all context ranks), its output and the log of each row's sum. In latent attention the small
    vectors have norms, and v is padded to the size of q; the output is kept so, and in its own size. The MLP
    keeps gate, up, the activated gate and their product, as far as the backend does; a router in fp32 a copy
    of its input. Where layers differ, it is their mean.

    Args:
        pads: whether sequences have different lengths. Without a kernel for that, attention keeps padded
            copies of q, k, v and the output, and the output without padding.
        num_mlp: number of these four that the MLP keeps.
    """
    shape, width = rank.shape, rank.width
    heads, kv = rank.query_size, rank.key_copies * rank.key_value_size
    attention: float = width * (2 * heads + 2 * kv * rank.context) + FP32_BYTES * shape.num_heads
    latent, small, outputs = shape.latent, 0, heads
    if latent is not None:
        outputs = shape.num_heads * latent.value
        ranks = (latent.kv_rank, *(() if latent.q_rank is None else (latent.q_rank,)))
        small = width * latent.rope + sum(_kept_by_norm(size, width) for size in ranks)
    if pads and not rank.has_varlen_kernel:
        attention = SLOTS_PER_TOKEN * attention + width * outputs
    elif latent is not None:
        attention += width * outputs
    if shape.has_qk_norm:
        num_norms = shape.num_heads + shape.num_kv_heads
        attention += num_norms * ((8 if width == FP32_BYTES else 6) * shape.head_dim + FP32_BYTES)
    norms = (4 if shape.has_post_norms else 2) * _kept_by_norm(shape.hidden, width)
    return norms + small + _kept_by_router(shape, width), attention + num_mlp * width * mean_mlp_rows(shape)


def layer_input(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes of a layer's input, which is all that is kept of a recomputed layer."""
    return rank.width * rank.shape.hidden * batch.tokens // rank.token_share


def kept_by_layers(rank: Rank, batch: MicroBatch, num_layers: int, one: int) -> int:
    """Return the bytes that autograd keeps of layers, of all micro-batches in flight, until backward.

    `one` are the bytes that a layer keeps if it is not recomputed.
    """
    if not rank.config.activation_checkpointing:
        return num_layers * one
    if rank.config.offload_activations and not rank.on_cpu:
        num_layers = min(num_layers, 1 + NUM_COPIED)
    return num_layers * layer_input(rank, batch)


def num_in_flight(rank: Rank, batch: MicroBatch) -> int:
    """Return the micro-batches that are between their forward and backward pass at once (1F1B)."""
    return min(rank.replica.layout.pipe - rank.stage, batch.num)


def inputs_in_host_memory(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes that layers and the final norm have in host memory at once, on an accelerator."""
    if not rank.config.offload_activations or rank.on_cpu:
        return 0
    norm = _kept_by_norm(rank.shape.hidden, rank.width) * batch.tokens // rank.token_share
    layers = rank.sizes.num_layers * layer_input(rank, batch)
    return num_in_flight(rank, batch) * (layers + norm * rank.is_last_stage)


def kept_outside_layers(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes kept of the final norm, the rows that predict learned tokens, cos and sin.

    And of the mask behind shared prompts, and the tables of repeated tokens and their keys.
    """
    shape, width = rank.shape, rank.width
    norm = _kept_by_norm(shape.hidden, width) * batch.tokens // rank.token_share
    learned = width * shape.hidden * batch.num_learned if shape.head == "lm" else 0
    mask = 0 if rank.has_varlen_kernel else width * batch.mask
    repeated = mask + BYTES_OF_REPEATED * batch.repeated
    return norm + 2 * width * shape.head_dim * batch.tokens + learned + repeated


def backward_buffers(rank: Rank, batch: MicroBatch, num_mlp: int = 2) -> int:
    """Return the bytes of the backward pass of a layer's MLP, beyond what is kept.

    Its rows, the gradient of the residual, with sequence parallelism the gathered input, and with experts the
    gradients of each copy of a token, as it left its expert and as it entered it. It needs `num_mlp` tensors
    of the MLP's rows.
    """
    copies = 0 if rank.shape.experts is None else 2 * rank.shape.experts.per_token
    hidden = rank.shape.hidden * ((1 if rank.token_share == 1 else 2) + copies)
    mlp = rank.width * (num_mlp * _most_mlp_rows(rank.shape) // rank.tensor + hidden) * batch.tokens
    if not batch.repeated:
        return mlp
    return max(mlp, _attention_gradients(rank, batch))


def weighted_copies(rank: Rank, tokens: int, *, has_gradient: bool) -> int:
    """Return the bytes at the moment when transformers weights the outputs of experts; 0 without experts.

    In the backward pass, beyond what is kept: the gradient of each weighted copy of a token, its products
    with the weight and with the output, the output's gradient if in another dtype, and the residual's.
    Without gradient: each copy of a token, the outputs, the weighted ones in two orders, and rows of D.
    Source: `grouped_mm_experts_forward` in transformers/integrations/moe.py.
    """
    shape, width = rank.shape, rank.width
    if shape.experts is None:
        return 0
    kind = ROUTERS.get(shape.family)
    weighted = FP32_BYTES if kind is not None and (kind.in_fp32 or kind.weighs_in_fp32) else width
    if has_gradient:
        rows = (3 * weighted + width * (weighted != width)) * shape.experts.per_token + width
    else:
        rows = 2 * (weighted + width) * shape.experts.per_token + 4 * width
    return rows * shape.hidden * tokens


def _attention_gradients(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes of the backward pass of attention behind shared prompts, beyond what is kept.

    Gradients of the residual, of attention's output and of q, with a padded copy of each; and of keys and
    values, which are summed over samples.
    """
    heads, kv = rank.query_size // rank.tensor, rank.key_value_size // rank.tensor
    own = (rank.shape.hidden + 4 * heads + 2 * kv) * batch.tokens
    keys = 2 * kv * rank.key_copies * (batch.tokens + batch.repeated)
    return rank.width * (own + round(SLOTS_PER_TOKEN * keys))


def tower_activations(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes that autograd keeps of the tower until its backward pass, the last one.

    A block keeps what a decoder layer keeps, of each patch; recomputed ones keep their inputs. The patches
    and what merges them into tokens are kept too. Nothing is kept of a tower that is not trained.
    """
    tower, width = rank.shape.vision, rank.width
    if tower is None or not batch.patches:
        return 0
    features = image_features(rank, batch.image_tokens)
    if not trains_tower(rank):
        return features
    of_block = width * tower.hidden if rank.config.activation_checkpointing else kept_by_tower_block(rank)
    embedded = width * (tower.patch_matrix // tower.hidden + (1 if tower.frames == 1 else 3) * tower.hidden)
    blocks = batch.patches * (tower.num_layers * of_block + embedded)
    return features + blocks + merged_activations(rank, batch)


def image_features(rank: Rank, num_tokens: int) -> int:
    """Return the bytes of what the tower makes of images with some tokens."""
    tower = rank.shape.vision
    return 0 if tower is None else (1 + tower.num_deep) * rank.width * tower.output * num_tokens


def merged_activations(rank: Rank, batch: MicroBatch) -> int:
    """Return the part of `tower_activations` that is kept of merging patches into tokens."""
    tower = rank.shape.vision
    if tower is None or not trains_tower(rank):
        return 0
    rows = 2 if tower.family == "smolvlm" else 4 * (1 + tower.num_deep)
    return batch.patches * rank.width * rows * tower.hidden


def trains_tower(rank: Rank) -> bool:
    """Return whether gradients reach the tower."""
    return rank.config.lora is None and rank.config.freeze is None


def kept_by_tower_block(rank: Rank) -> int:
    """Return the bytes per patch that autograd keeps of a block.

    The norms of Qwen2.5-VL are those of its language model; others keep input and output. Attention keeps q,
    k and v, what turns q and k by their positions, its output and the log of each row's sum.
    """
    tower, width = rank.shape.vision, rank.width
    assert tower is not None
    d = tower.hidden
    norms = 2 * _kept_by_norm(d, width) if tower.has_gate else 4 * width * d + 4 * FP32_BYTES
    attention = (4 if tower.family == "smolvlm" else 6) * width * d + FP32_BYTES * tower.num_heads
    return norms + attention + (4 if tower.has_gate else 2) * width * tower.intermediate


def tower_without_gradient(rank: Rank, patches: int) -> int:
    """Return the bytes of a block's forward pass without gradient, with its input and the patches.

    Queries and keys are turned by their positions in fp32.
    """
    tower, width = rank.shape.vision, rank.width
    if tower is None:
        return 0
    d, turns = tower.hidden, tower.family != "smolvlm"
    in_norm = (2 * width + 3 * FP32_BYTES) * d
    in_attention = (5 * width + 8 * FP32_BYTES if turns else 10 * width) * d
    in_mlp = width * (3 * d + (1 + tower.num_mlp * turns) * tower.intermediate)
    pixels = width * (tower.patch_matrix // d)
    return (max(in_norm, in_attention, in_mlp) + pixels) * patches


def final_norm_buffers(rank: Rank, batch: MicroBatch) -> int:
    """Return the bytes of the backward pass of a norm, beyond what is kept: five rows of fp32."""
    return 5 * FP32_BYTES * rank.shape.hidden * batch.tokens // rank.token_share


def layer_without_gradient(rank: Rank, tokens: int, *, pads: bool, repeated: int = 0) -> int:
    """Return the bytes of a layer's forward pass without gradient, with its input.

    The largest of the norm, the attention and the MLP. `repeated` is that of a micro-batch.
    """
    shape, width = rank.shape, rank.width
    heads, kv = rank.query_size // rank.tensor, rank.key_value_size // rank.tensor
    in_norm = (2 * width + 3 * FP32_BYTES) * shape.hidden
    rows = 3 * heads + 3 * kv if rank.has_varlen_kernel or not pads else 6 * heads + 4 * kv
    if rank.key_copies > 1:
        rows += 2 * rank.key_copies * kv * rank.context
    rows += 4 * kv * (rank.context - 1)  # keys and values of other ranks, gathered and by sequence
    in_attention = width * (3 * shape.hidden + rows + 2 * shape.head_dim)
    copies = 0 if shape.experts is None else shape.experts.per_token
    in_mlp = width * (3 * _most_mlp_rows(shape) // rank.tensor + (4 + copies) * shape.hidden)
    keys = round((SLOTS_PER_TOKEN if pads else 1) * 2 * rank.key_copies * kv * width * repeated)
    return max(max(in_norm, in_mlp) * tokens, in_attention * tokens + keys)


def logits(rank: Rank, batch: MicroBatch, num_tiles: int) -> int:
    """Return the bytes of the logits that exist at once, and of tiles of them in fp32.

    A scalar head has its input in fp32 instead.

    Args:
        num_tiles: 2 in the forward pass of training, a tile's logits and their exponentials, as the losses of
            the library compute log-probs and entropy together; 1 in inference and in the backward pass, where
            the result takes the place of the logits.
    """
    shape = rank.shape
    if shape.head != "lm":
        return FP32_BYTES * shape.hidden * batch.tokens
    vocab = -(-shape.vocab // rank.tensor)
    num_rows = min(batch.num_learned, max(CHUNK_BYTES // (rank.width * vocab), 1))
    tile = min(num_rows, max(LOGITS_PER_TILE // vocab, 1))
    of_tiles = num_tiles * FP32_BYTES * tile * vocab
    return rank.width * num_rows * vocab + max(of_tiles, reordered_output(rank))


def trained_logits(rank: Rank, batch: MicroBatch, matrix: int) -> Items:
    """Return the larger of two moments: logits in the forward pass, or in the backward pass with a gradient.

    `matrix` are the bytes of the output matrix's gradient, which exists once the forward pass's tiles are
    gone.
    """
    forward, backward = (item(MemoryCategory.LOGITS, logits(rank, batch, num_tiles)) for num_tiles in (2, 1))
    return largest([forward, backward + item(MemoryCategory.GRADIENTS, matrix)])


def reordered_output(rank: Rank) -> int:
    """Return the bytes of oneDNN's reordered copy of the output matrix, for bf16 products on a CPU."""
    return rank.width * rank.sizes.output if rank.on_cpu and rank.width < FP32_BYTES else 0


@lru_cache
def _most_mlp_rows(shape: ModelShape) -> int:
    """Return the rows of F that a token passes in the layer with most of them."""
    return max(mlp_rows(shape, layer) for layer in range(shape.num_layers))


def _kept_by_router(shape: ModelShape, width: int) -> int:
    """Return the bytes per token of a router's input in fp32, if that is a copy, as the mean over layers."""
    kind = ROUTERS.get(shape.family)
    if width == FP32_BYTES or kind is None or not kind.in_fp32:
        return 0
    return FP32_BYTES * shape.hidden * expert_layers(shape, 0, shape.num_layers) // shape.num_layers


def _kept_by_norm(size: int, width: int) -> int:
    """Return the bytes per token that a norm keeps of rows of `size`, with the inverse root mean square."""
    return (3 * FP32_BYTES if width == FP32_BYTES else FP32_BYTES + 2 * width) * size + FP32_BYTES
