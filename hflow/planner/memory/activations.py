"""Bytes of activations: what autograd keeps of a decoder layer, and what passes through one.

T tokens, D hidden, F intermediate, H heads, K key-value heads, E head size. A norm computes in fp32 in every
precision, and attention keeps no scores (flash kernels). What tensor ranks share, and what only sequence
parallelism divides, is as in Korthikanti et al. 2022, "Reducing activation recomputation in large transformer
models", section 4: rows of F and of heads are divided by the tensor size; rows of D are not, unless ranks
share the tokens between the matrices.
"""

from __future__ import annotations

from hflow.planner.memory.microbatch import MicroBatch
from hflow.planner.memory.rank import Rank

SLOTS_PER_TOKEN = 8 / 7
"""Padded slots a token where lengths differ: a bucket's sequences have 3/4 to 1 of its width, 7/8 on average
(`backends/packed_attention.py`)."""
LOGITS_PER_CHUNK = 1 << 26
"""Logits that exist at once on a rank (`backends/common/chunked.py`)."""
FP32 = 4


def kept_by_layer(rank: Rank, batch: MicroBatch) -> int:
    """Bytes that autograd keeps of one decoder layer until its backward pass."""
    whole, shared = kept_per_token(rank, pads=batch.pads)
    return round((whole / rank.token_share + shared / rank.tensor) * batch.tokens)


def kept_per_token(rank: Rank, *, pads: bool) -> tuple[int, float]:
    """Bytes a token that a layer keeps: those of rows of D, and those that tensor ranks share.

    A norm keeps its input, the normed rows and its output (in bf16 the input as fp32); attention q, k, v,
    its output and the log of each row's sum; the MLP gate, up, the activated gate and their product.

    Args:
        rank: its model and dtype.
        pads: whether sequences are of different lengths: without a kernel for that, attention keeps padded
            copies of q, k, v and the output, and the output without padding.
    """
    shape, width = rank.shape, rank.width
    heads, kv = rank.query_size, rank.key_value_size
    attention: float = width * (2 * heads + 2 * kv) + FP32 * shape.num_heads
    if pads and not rank.has_varlen_kernel:
        attention = SLOTS_PER_TOKEN * attention + width * heads
    if shape.has_qk_norm:
        num_norms = shape.num_heads + shape.num_kv_heads
        attention += num_norms * ((8 if width == FP32 else 6) * shape.head_dim + FP32)
    return 2 * _norm(shape.hidden, width), attention + 4 * width * shape.intermediate


def layer_input(rank: Rank, batch: MicroBatch) -> int:
    """Bytes of one layer's input: all that recomputation keeps of it."""
    return rank.width * rank.shape.hidden * batch.tokens // rank.token_share


def kept_by_ends(rank: Rank, batch: MicroBatch) -> int:
    """Bytes kept outside the layers: the final norm, the rows that predict learned tokens, cos and sin."""
    shape, width = rank.shape, rank.width
    norm = _norm(shape.hidden, width) * batch.tokens // rank.token_share
    learned = width * shape.hidden * batch.num_learned if shape.head == "lm" else 0
    return norm + 2 * width * shape.head_dim * batch.tokens + learned


def backward_buffers(rank: Rank, batch: MicroBatch) -> int:
    """Bytes beyond what is kept while the backward pass is in a layer's MLP.

    Two more of its rows, the residual's gradient, and where ranks share tokens the gathered input.
    """
    hidden = rank.shape.hidden * (1 if rank.token_share == 1 else 2)
    return rank.width * (2 * rank.shape.intermediate // rank.tensor + hidden) * batch.tokens


def final_norm_buffers(rank: Rank, batch: MicroBatch) -> int:
    """Bytes beyond what is kept in the backward pass of a norm: five rows of fp32."""
    return 5 * FP32 * rank.shape.hidden * batch.tokens // rank.token_share


def passing_layer(rank: Rank, tokens: int, *, pads: bool) -> int:
    """Bytes of a layer's forward without gradient, its input included: the most of norm, attention, MLP."""
    shape, width = rank.shape, rank.width
    heads, kv = rank.query_size // rank.tensor, rank.key_value_size // rank.tensor
    in_norm = (2 * width + 3 * FP32) * shape.hidden
    rows = 3 * heads + 3 * kv if rank.has_varlen_kernel or not pads else 6 * heads + 4 * kv
    in_attention = width * (3 * shape.hidden + rows + 2 * shape.head_dim)
    in_mlp = width * (3 * shape.intermediate // rank.tensor + 4 * shape.hidden)
    return max(in_norm, in_attention, in_mlp) * tokens


def logits(rank: Rank, batch: MicroBatch, *, with_gradient: bool) -> int:
    """Bytes of the logits that exist at once, with what is computed of them in fp32.

    Training: logits, log-probs, their exponents and the product of the two, as log-probs and entropy are
    measured together (what the library's losses do). Inference: logits and log-probs. A scalar head has its
    input in fp32 instead.
    """
    shape = rank.shape
    if shape.head != "lm":
        return FP32 * shape.hidden * batch.tokens
    vocab = -(-shape.vocab // rank.tensor)
    num_rows = min(batch.num_learned, max(LOGITS_PER_CHUNK // vocab, 1))
    return (4 if with_gradient else 2) * FP32 * num_rows * vocab + reordered_output(rank)


def reordered_output(rank: Rank) -> int:
    """Bytes of the output matrix in oneDNN's own order, which a CPU computes bf16 products with."""
    return rank.width * rank.sizes.output if rank.on_cpu and rank.width < FP32 else 0


def _norm(size: int, width: int) -> int:
    """Bytes a token that a norm keeps of rows of `size`, and the inverse of their root mean square."""
    return (3 * FP32 if width == FP32 else FP32 + 2 * width) * size + FP32
