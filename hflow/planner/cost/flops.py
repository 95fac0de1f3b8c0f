"""FLOPs and weights of a decoder-only transformer. A multiply-add is two FLOPs.

Norms, activation functions and rotary embeddings are left out, as they are below one percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.planner.model_shape import ModelShape
from hflow.planner.weights.sharding import stage_layers

MIN_SAVED_FRACTION = 0.1
"""Fraction of tokens in shared prompts from which on a backend computes these once."""


@dataclass(frozen=True)
class Work:
    """What a forward pass computes, summed over samples. A part of a batch may have fractions of samples."""

    groups: float
    sequences: float
    tokens: float
    rows: float
    """Tokens whose hidden states are computed. Prompts that a group shares may count once."""
    learned: float
    """Tokens that the output matrix computes logits for: those of responses."""
    squares: float
    """Sum of the squares of the samples' token counts."""

    def share(self, part: float) -> Work:
        """Return a fraction of the work."""
        return Work(*(part * amount for amount in vars(self).values()))


def work_of(lengths: Sequence[int], prompt: int, group_size: int, budget: int | None = None) -> Work:
    """Return the work of a batch of samples.

    Args:
        lengths: tokens of each sample.
        prompt: how many of them are its prompt.
        group_size: samples that share a prompt.
        budget: tokens of a micro-batch, for a backend that computes shared prompts once. It does if a whole
            group fits and `MIN_SAVED_FRACTION` is saved. None for other backends.
    """
    tokens, groups = sum(lengths), len(lengths) / group_size
    shared = prompt * (len(lengths) - groups)
    is_shared = budget is not None and tokens / groups <= budget and shared >= MIN_SAVED_FRACTION * tokens
    return Work(
        groups=groups,
        sequences=len(lengths),
        tokens=tokens,
        rows=tokens - shared if is_shared else tokens,
        learned=tokens - prompt * len(lengths),
        squares=sum(length * length for length in lengths),
    )


def layer_parameters(shape: ModelShape) -> int:
    """Return the elements of one layer's matrices."""
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden
    return attention + 3 * shape.hidden * shape.intermediate


def head_parameters(shape: ModelShape) -> int:
    """Return the elements of the output matrix; a value or score head is a vector."""
    return shape.hidden * (shape.vocab if shape.head == "lm" else 1)


def attention_flops(shape: ModelShape, pairs: float) -> float:
    """Return the FLOPs of one layer's attention over (query, key) pairs, for QK and PV."""
    return 4 * pairs * shape.num_heads * shape.head_dim


def layer_flops(shape: ModelShape, work: Work) -> float:
    """Return the FLOPs of one layer's forward pass. Causal attention computes half of all pairs."""
    return 2 * layer_parameters(shape) * work.rows + attention_flops(shape, work.squares / 2)


def head_flops(shape: ModelShape, work: Work) -> float:
    """Return the FLOPs of the output matrix in a forward pass."""
    return 2 * head_parameters(shape) * work.learned


def token_flops(shape: ModelShape, num_tokens: float, context: float) -> float:
    """Return the FLOPs of decoding one token per sequence, if all have `context` tokens together."""
    matrices = shape.num_layers * layer_parameters(shape) + head_parameters(shape)
    return 2 * matrices * num_tokens + shape.num_layers * attention_flops(shape, context)


def stage_flops(shape: ModelShape, work: Work, num_stages: int, layer_passes: int, head_passes: int) -> float:
    """Return the FLOPs of the pipeline stage with most of them; the last one has the head.

    Args:
        shape: the model.
        work: of a forward pass.
        num_stages: pipeline stages.
        layer_passes: cost of the layers in forward passes; 3 with the backward pass.
        head_passes: the same for the output matrix.
    """
    stages = [
        (last - first) * layer_flops(shape, work) * layer_passes
        for first, last in stage_layers(shape.num_layers, num_stages)
    ]
    stages[-1] += head_flops(shape, work) * head_passes
    return max(stages)


def stage_parameters(shape: ModelShape, num_stages: int) -> int:
    """Return the weights of the largest stage: the first has the embedding, the last the head.

    A tied output matrix is the embedding, of which the last of several stages has a copy.
    """
    counts = [
        (last - first) * layer_parameters(shape) for first, last in stage_layers(shape.num_layers, num_stages)
    ]
    counts[0] += shape.vocab * shape.hidden
    if num_stages > 1 or not shape.is_tied:
        counts[-1] += head_parameters(shape)
    return max(counts)


def kv_entries(shape: ModelShape, num_tensor_ranks: int) -> int:
    """Return the elements of one token's keys and values on a tensor rank, in all layers.

    If there are more ranks than key-value heads, several ranks hold the same heads.
    """
    return 2 * shape.num_layers * -(-shape.num_kv_heads // num_tensor_ranks) * shape.head_dim
