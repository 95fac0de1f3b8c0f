"""FLOPs and weights of a decoder-only transformer. A multiply-add is two FLOPs.

Norms, activation functions and rotary embeddings are left out: they are below a percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.planner.model_shape import ModelShape
from hflow.planner.weights.sharding import stage_layers

MIN_SAVED_FRACTION = 0.1
"""Share of the tokens that must be shared prompts for a backend to compute these once."""


@dataclass(frozen=True)
class Work:
    """What forward passes go through, summed over samples. A part of a batch has fractions of samples."""

    groups: float
    sequences: float
    tokens: float
    rows: float
    """Tokens whose hidden states are computed: prompts that a group shares may count once."""
    learned: float
    """Tokens that the output matrix sees: those of responses."""
    squares: float
    """Sum of the squares of the samples' token counts."""

    def share(self, part: float) -> Work:
        """A part of it."""
        return Work(*(part * amount for amount in vars(self).values()))


def work_of(lengths: Sequence[int], prompt: int, group_size: int, budget: int | None = None) -> Work:
    """What a batch of samples amounts to.

    Args:
        lengths: tokens of each sample.
        prompt: those among them that are its prompt.
        group_size: samples that share a prompt.
        budget: tokens of a micro-batch, for a backend that computes shared prompts once; it does where
            a whole group fits and `MIN_SAVED_FRACTION` is saved. None for one that does not.
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
    """Entries of one layer's matrices."""
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden
    return attention + 3 * shape.hidden * shape.intermediate


def head_parameters(shape: ModelShape) -> int:
    """Entries of the output matrix; a value or score head is a vector."""
    return shape.hidden * (shape.vocab if shape.head == "lm" else 1)


def attention_flops(shape: ModelShape, pairs: float) -> float:
    """FLOPs of one layer's attention over (query, key) pairs: each is a row of QK and a row of PV."""
    return 4 * pairs * shape.num_heads * shape.head_dim


def layer_flops(shape: ModelShape, work: Work) -> float:
    """FLOPs of one layer's forward pass. Causal attention sees half of all pairs."""
    return 2 * layer_parameters(shape) * work.rows + attention_flops(shape, work.squares / 2)


def head_flops(shape: ModelShape, work: Work) -> float:
    """FLOPs of the output matrix in a forward pass."""
    return 2 * head_parameters(shape) * work.learned


def token_flops(shape: ModelShape, num_tokens: float, context: float) -> float:
    """FLOPs of decoding one token each for `num_tokens` sequences that have `context` tokens together."""
    matrices = shape.num_layers * layer_parameters(shape) + head_parameters(shape)
    return 2 * matrices * num_tokens + shape.num_layers * attention_flops(shape, context)


def stage_flops(shape: ModelShape, work: Work, num_stages: int, layer_passes: int, head_passes: int) -> float:
    """FLOPs of the heaviest pipeline stage; the last one has the head.

    Args:
        shape: the model.
        work: what a forward pass goes through.
        num_stages: pipeline stages.
        layer_passes: forward passes that layers amount to, 3 with the backward pass.
        head_passes: the same for the output matrix.
    """
    stages = [
        (last - first) * layer_flops(shape, work) * layer_passes
        for first, last in stage_layers(shape.num_layers, num_stages)
    ]
    stages[-1] += head_flops(shape, work) * head_passes
    return max(stages)


def stage_parameters(shape: ModelShape, num_stages: int) -> int:
    """Weights of the heaviest stage: the first has the embedding, the last the head.

    A tied output matrix is the embedding, of which the last stage of several has a copy.
    """
    counts = [
        (last - first) * layer_parameters(shape) for first, last in stage_layers(shape.num_layers, num_stages)
    ]
    counts[0] += shape.vocab * shape.hidden
    if num_stages > 1 or not shape.is_tied:
        counts[-1] += head_parameters(shape)
    return max(counts)


def kv_entries(shape: ModelShape, num_tensor_ranks: int) -> int:
    """Entries of keys and values that one token leaves on a tensor rank, in all layers.

    Ranks in excess of the key-value heads repeat them.
    """
    return 2 * shape.num_layers * -(-shape.num_kv_heads // num_tensor_ranks) * shape.head_dim
