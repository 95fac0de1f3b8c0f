"""FLOPs and weights of a decoder-only transformer. A multiply-add is two FLOPs.

Norms, activation functions, rotary embeddings and biases are left out, as they are below one percent. Of a
layer's experts those that a token passes compute, and those that any token of a batch passes are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hflow.planner.plan.workload import PromptImages
from hflow.shapes.layout import stage_layers
from hflow.shapes.model_shape import ModelShape, cached_tokens, equal_layers
from hflow.shapes.vision_shape import VisionShape, num_tower_parameters


@dataclass(frozen=True)
class Work:
    """The work of a forward pass, summed over samples. A part of a batch may have fractions of samples."""

    groups: float
    sequences: float
    tokens: float
    rows: float
    """Tokens whose hidden states are computed. Prompts that a group shares may count once."""
    learned: float
    """Tokens that the output matrix computes logits for: those of responses."""
    squares: float
    """Sum of the squares of the samples' token counts. A prompt that is computed once counts once."""
    patches: float = 0.0
    """Patches that pass the tower: those of each image once for each micro-batch that has it."""
    full_pairs: float = 0.0
    """Pairs of these patches that see each other in a block without windows."""
    windowed_pairs: float = 0.0
    """The same in a block with windows."""

    def share(self, part: float) -> Work:
        """Return a fraction of the work."""
        return Work(*(part * amount for amount in vars(self).values()))


def work_of(
    lengths: Sequence[int],
    prompt: int,
    group_size: int,
    budget: int | None = None,
    images: PromptImages | None = None,
) -> Work:
    """Return the work of a batch of samples.

    Args:
        prompt: the number of tokens that are the prompt.
        budget: tokens of a micro-batch, for a backend that computes shared prompts once: for all samples of a
            group that fit into a micro-batch, where they count once. None for other backends.
        images: the images of each prompt. A micro-batch computes them once for all samples with the prompt.
    """
    tokens, groups = sum(lengths), len(lengths) / group_size
    learned = tokens - prompt * len(lengths)
    sharing = 1  # samples that share the computation of a prompt
    if budget is not None and len(lengths):
        once = prompt if images is None else 0  # the tokens of images count for each sample
        each = max(tokens / len(lengths) - once, 1)
        sharing = min(group_size, max(1, math.floor((budget - once) / each)))
    repeated = len(lengths) - len(lengths) / sharing
    return Work(
        groups=groups,
        sequences=len(lengths),
        tokens=tokens,
        rows=tokens - prompt * repeated,
        learned=learned,
        squares=sum(length * length for length in lengths) - prompt * prompt * repeated,
        **_tower_work(images, groups, 1.0 if budget is None else max(1.0, tokens / groups / budget)),
    )


def _tower_work(images: PromptImages | None, groups: float, num_microbatches: float) -> dict[str, float]:
    """Return the tower's work for the prompts of groups that are in some micro-batches each."""
    if images is None:
        return {}
    num, load = images.count * groups * num_microbatches, images.load
    return {
        "patches": num * load.patches,
        "full_pairs": num * load.full_pairs,
        "windowed_pairs": num * load.windowed_pairs,
    }


def tower_products(tower: VisionShape, work: Work) -> float:
    """Return the FLOPs of a tower's matrices in a forward pass."""
    of_patch = tower.num_layers * tower.block_matrices + tower.patch_matrix
    return 2 * work.patches * (of_patch + tower.projection_matrices / tower.merge**2)


def tower_attention(tower: VisionShape, work: Work) -> float:
    """Return the FLOPs of a tower's attention in a forward pass, QK and PV: each patch sees all others."""
    num_full = len(tower.full_layers) if tower.window else tower.num_layers
    pairs = num_full * work.full_pairs + (tower.num_layers - num_full) * work.windowed_pairs
    return 4 * tower.hidden * pairs


def tower_flops(tower: VisionShape | None, work: Work) -> float:
    """Return the FLOPs of a tower's forward pass over the images of some samples."""
    return 0.0 if tower is None else tower_products(tower, work) + tower_attention(tower, work)


def attention_parameters(shape: ModelShape) -> int:
    """Return the elements of the matrices of one layer's attention."""
    d, heads, latent = shape.hidden, shape.num_heads, shape.latent
    if latent is None:
        return (2 * heads + 2 * shape.num_kv_heads) * shape.head_dim * d
    queries = heads * (latent.nope + latent.rope)
    q = d * queries if latent.q_rank is None else latent.q_rank * (d + queries)
    kv = d * latent.cached + latent.kv_rank * heads * (latent.nope + latent.value)
    return q + kv + heads * latent.value * d


def mlp_parameters(shape: ModelShape, layer: int, num_experts: float | None = None) -> float:
    """Return the elements of the matrices of a layer's MLP, with some of its experts or all."""
    experts = shape.experts
    if experts is None or not experts.are_in(layer):
        return 3 * shape.hidden * shape.intermediate
    num = experts.num if num_experts is None else num_experts
    return shape.hidden * (3 * (num * experts.intermediate + experts.shared) + experts.num)


@lru_cache(maxsize=4096)
def layers_parameters(shape: ModelShape, first: int, last: int, num_experts: float | None = None) -> float:
    """Return the elements of the matrices of layers `[first, last)`; `num_experts` as `mlp_parameters`."""
    mlps = sum(
        (stop - start) * mlp_parameters(shape, start, num_experts)
        for start, stop in equal_layers(shape, first, last)
    )
    return (last - first) * attention_parameters(shape) + mlps


def layer_parameters(shape: ModelShape, num_experts: float | None = None) -> float:
    """Return the mean elements of a layer's matrices; `num_experts` as `mlp_parameters`."""
    return layers_parameters(shape, 0, shape.num_layers, num_experts) / shape.num_layers


def active_experts(shape: ModelShape) -> float | None:
    """Return the number of experts that a token passes in a layer, None without experts."""
    return None if shape.experts is None else shape.experts.per_token


def touched_experts(shape: ModelShape, num_tokens: float) -> float | None:
    """Return the expected number of experts that any of some tokens passes in a layer.

    Each of N experts is chosen by a token with probability k / N, so that it stays untouched by n tokens with
    probability (1 - k / N)^n. Uneven routing touches fewer.
    """
    if shape.experts is None:
        return None
    num = shape.experts.num
    missed: float = (1 - shape.experts.per_token / num) ** num_tokens
    return num * (1 - missed)


def head_parameters(shape: ModelShape) -> int:
    """Return the elements of the output matrix; a value or score head is a vector."""
    return shape.hidden * (shape.vocab if shape.head == "lm" else 1)


def attention_flops(shape: ModelShape, pairs: float) -> float:
    """Return the FLOPs of one layer's attention over (query, key) pairs, for QK and PV."""
    sizes = 2 * shape.head_dim
    if shape.latent is not None:
        sizes = shape.latent.nope + shape.latent.rope + shape.latent.value
    return 2 * pairs * shape.num_heads * sizes


def decode_attention_flops(shape: ModelShape, pairs: float) -> float:
    """Return the FLOPs of one layer's attention when decoding.

    Latent attention works on the cached vectors: queries are projected to their size first (DeepSeek-AI 2024,
    "DeepSeek-V2", section 2.1.2).
    """
    if shape.latent is None:
        return attention_flops(shape, pairs)
    return 2 * pairs * shape.num_heads * (shape.latent.cached + shape.latent.kv_rank)


def causal_pairs(shape: ModelShape, work: Work) -> float:
    """Return the (query, key) pairs of causal attention, as the mean over layers.

    A sequence of n tokens has n^2 / 2, and with a window of w < n tokens w n - w^2 / 2. All sequences count
    as equally long, with the mean that computed tokens see.
    """
    pairs = work.squares / 2
    if shape.window is None or not work.rows:
        return pairs
    length, w = work.squares / work.rows, shape.window.tokens
    windowed = work.rows * (w - w * w / (2 * length)) if w < length else pairs
    num_full = shape.num_layers // shape.window.full_every
    return (num_full * pairs + (shape.num_layers - num_full) * windowed) / shape.num_layers


def layer_flops(shape: ModelShape, work: Work) -> float:
    """Return the mean FLOPs of a layer's forward pass."""
    matrices = layer_parameters(shape, active_experts(shape))
    return 2 * matrices * work.rows + attention_flops(shape, causal_pairs(shape, work))


def head_flops(shape: ModelShape, work: Work) -> float:
    """Return the FLOPs of the output matrix in a forward pass."""
    return 2 * head_parameters(shape) * work.learned


def training_flops(shape: ModelShape, work: Work, *, has_adapters: bool = False) -> float:
    """Return the FLOPs that training on some samples needs, however they are computed.

    A backward pass costs as much as two forward passes. Where only adapters are trained, the matrices beside
    them have no gradients, so that it costs as much as one there. What is computed again does not count.
    Source: Chowdhery et al. 2022, "PaLM: scaling language modeling with Pathways", appendix B.
    """
    layers, head = shape.num_layers * layer_flops(shape, work), head_flops(shape, work)
    attention = shape.num_layers * attention_flops(shape, causal_pairs(shape, work))
    unneeded = layers - attention + head if has_adapters else 0.0
    tower = (1 if has_adapters else 3) * tower_flops(shape.vision, work)
    return 3 * (layers + head) - unneeded + tower


def token_flops(shape: ModelShape, num_tokens: float, context: float) -> float:
    """Return the FLOPs of decoding one token per sequence, if all have `context` tokens together."""
    matrices = shape.num_layers * layer_parameters(shape, active_experts(shape)) + head_parameters(shape)
    pairs = num_tokens * cached_tokens(shape, context / num_tokens) if num_tokens else 0.0
    return 2 * matrices * num_tokens + shape.num_layers * decode_attention_flops(shape, pairs)


def stage_flops(shape: ModelShape, work: Work, num_stages: int, layer_passes: int, head_passes: int) -> float:
    """Return the FLOPs of the pipeline stage with most of them; the last one has the head.

    `layer_passes` is the cost of the layers in forward passes, 3 with the backward pass, and `head_passes`
    that of the output matrix.
    """
    per_layer = layer_flops(shape, work) * layer_passes
    stages = [(last - first) * per_layer for first, last in stage_layers(shape.num_layers, num_stages)]
    stages[-1] += head_flops(shape, work) * head_passes
    return max(stages)


@lru_cache(maxsize=1024)
def stage_parameters(shape: ModelShape, num_stages: int, num_experts: float | None = None) -> float:
    """Return the weights of the largest stage: the first has tower and embedding, the last the head.

    A tied output matrix is the embedding, of which the last of several stages has a copy. `num_experts` is
    that of `mlp_parameters`.
    """
    counts = [
        layers_parameters(shape, first, last, num_experts)
        for first, last in stage_layers(shape.num_layers, num_stages)
    ]
    counts[0] += shape.vocab * shape.hidden
    counts[0] += 0 if shape.vision is None else num_tower_parameters(shape.vision)
    if num_stages > 1 or not shape.is_tied:
        counts[-1] += head_parameters(shape)
    return max(counts)


def kv_entries(shape: ModelShape, num_tensor_ranks: int) -> int:
    """Return the elements of one token's keys and values on a tensor rank, in all layers.

    If there are more ranks than key-value heads, several ranks hold the same heads. The vectors of latent
    attention are those of all heads, so every rank holds them. Layers with a window hold as many for fewer
    tokens (`cached_tokens`).
    """
    if shape.latent is not None:
        return shape.num_layers * shape.latent.cached
    return 2 * shape.num_layers * -(-shape.num_kv_heads // num_tensor_ranks) * shape.head_dim
