"""Triton kernels of the embedded engine's forward pass on CUDA, and of its draws.

A layer is nine kernels with them: norm, product, `rotate_heads`, attention, product, norm, product, `gate`,
product. Each computes what `engines/embedded/dense_decoder.py` and `sampling.py` compute by torch, up to
rounding. Launches depend on shapes alone, so a CUDA graph can hold them.

**Attention** of one query per sequence over its cached tokens: each program computes the query heads of a
sequence that share keys. It reads these keys and values once, only as many as the sequence has, and adds up
by the softmax with a running maximum (Milakov and Gimelshein 2018). It finds them page by page through the
sequence's row of a table (Kwon et al. 2023, "PagedAttention").

**Draws** read the logits once, in chunks of the vocabulary. The sums of the chunks say in which of them a
sequence's token is, and only that one is read again.

This module imports Triton, which builds of torch for CUDA install.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hflow.models.attention_kernels import CAUSAL, Reach, StoredHeads

_NUM_TOKENS = 64
"""Cached tokens that a program reads at once."""
_MIN_ROWS = 16
"""Fewest rows of a product on tensor cores."""
_GATED_COLUMNS = 1024
"""Columns of a program of `gate`."""
_CHUNK = 4096
"""Logits of a chunk of the vocabulary."""
_WIDE_ROW = 4096
"""Columns from which on a row has eight warps in place of four."""


def triton_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    scaling: float,
    reach: Reach = CAUSAL,
) -> Tensor:
    """Compute attention of one query per sequence; see `attention_kernels.decode_attention`."""
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_shared = num_heads // num_kv_heads
    out = torch.empty_like(q)
    strides = (table.stride(0), *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2])
    _attend[(num_sequences, num_kv_heads)](
        *(q, k, v, table, lengths, q if reach.sinks is None else reach.sinks, out, scaling, *strides),
        num_shared=num_shared,
        num_rows=max(_MIN_ROWS, triton.next_power_of_2(num_shared)),
        head_dim=head_dim,
        num_columns=max(_MIN_ROWS, triton.next_power_of_2(head_dim)),
        num_tokens=_NUM_TOKENS,
        page_tokens=k.shape[2],
        window=reach.window or 0,
        has_sinks=reach.sinks is not None,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """Return `weight * x / sqrt(mean(x^2) + eps)` of rows `[R, D]`; `eps` is a number on the device."""
    out = torch.empty_like(x)
    num_rows, num_columns = x.shape
    _norm[(num_rows,)](
        *(x, weight, eps, out, x.stride(0), out.stride(0)),
        num_columns=num_columns,
        block=triton.next_power_of_2(num_columns),
        num_warps=8 if num_columns >= _WIDE_ROW else 4,
    )
    return out


def gate(joined: Tensor) -> Tensor:
    """Return `silu(gate) * up` of both `[R, 2 F]`, in place: a view `[R, F]`."""
    num_rows, num_gated = len(joined), joined.shape[1] // 2
    _gate[(num_rows, triton.cdiv(num_gated, _GATED_COLUMNS))](
        joined, joined.stride(0), num_gated, block=_GATED_COLUMNS
    )
    return joined[:, :num_gated]


def rotate_heads(
    heads: Tensor,
    num_keys: int,
    cos: Tensor,
    sin: Tensor,
    norms: tuple[Tensor, Tensor, Tensor] | None,
    stored: StoredHeads | None,
) -> None:
    """Normalise and rotate queries and keys in place, and store keys and values in a cache.

    Args:
        heads: `[R, H + 2 K, d]`: queries, keys and values.
        num_keys: K.
        cos: cosines `[R, 1, d]`.
        sin: sines, those of the first half negated.
        norms: the weights `[d]` of the norms of queries and keys, and their eps, a number on the device.
        stored: where rows are stored; None if they are not.
    """
    num_rows, num_heads, head_dim = heads.shape
    q_weight, k_weight, eps = (heads,) * 3 if norms is None else norms
    where = StoredHeads(*(heads,) * 4) if stored is None else stored
    strides = (*where.keys.stride()[:3], *where.values.stride()[:3])
    _rotate[(num_rows, num_heads if stored is not None else num_heads - num_keys)](
        *(heads, cos, sin, q_weight, k_weight, eps, *where, *strides),
        *(0 if stored is None else len(where.blocks), heads.stride(0), heads.stride(1)),
        *(cos.stride(0), sin.stride(0), num_heads - 2 * num_keys, num_keys),
        half=head_dim // 2,
        block=triton.next_power_of_2(head_dim // 2),
        has_norms=norms is not None,
        num_warps=1,
    )


def draw_tokens(logits: Tensor, uniform: Tensor, temperature: Tensor | None, greedy: Tensor | None) -> Tensor:
    """Draw a token of each sequence from all of the vocabulary; see `sampling.draw`.

    Args:
        logits: `[S, V]`.
        uniform: float64 `[S]`, in [0, 1).
        temperature: float32 `[S, 1]`; None if it is 1 for all.
        greedy: bool `[S]`: which sequences take the likeliest token; None if none does.

    Returns:
        float64 `[2, S]`: token ids, and their log-probs under `log_softmax(logits / temperature)`.
    """
    num_sequences, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, _CHUNK)
    chunks = logits.new_empty(2, num_sequences, num_chunks, dtype=torch.float32)
    drawn = logits.new_empty(2, num_sequences, dtype=torch.float64)
    has_temperature, has_greedy = temperature is not None, greedy is not None
    temperatures = chunks if temperature is None else temperature
    _sum_chunks[(num_sequences, num_chunks)](
        *(logits, temperatures, *chunks, logits.stride(0), vocab),
        chunk=_CHUNK,
        has_temperature=has_temperature,
    )
    _draw[(num_sequences,)](
        *(logits, temperatures, uniform, chunks if greedy is None else greedy, *chunks, *drawn),
        *(logits.stride(0), vocab, num_chunks),
        chunk=_CHUNK,
        num_slots=triton.next_power_of_2(num_chunks),
        has_temperature=has_temperature,
        has_greedy=has_greedy,
    )
    return drawn


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    lengths,
    sinks,
    out,
    scaling,
    table_sequence,
    q_sequence,
    q_head,
    k_page,
    k_head,
    k_token,
    v_page,
    v_head,
    v_token,
    out_sequence,
    out_head,
    num_shared: tl.constexpr,
    num_rows: tl.constexpr,
    head_dim: tl.constexpr,
    num_columns: tl.constexpr,
    num_tokens: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    has_sinks: tl.constexpr,
):
    """Attend with the query heads of one sequence (program axis 0) that share one key head (axis 1).

    A window of 0 is none. A sink is the score with which a sum begins, without a value.
    """
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    length = tl.load(lengths + sequence)
    row, column, token = tl.arange(0, num_rows), tl.arange(0, num_columns), tl.arange(0, num_tokens)
    is_row, is_column = row < num_shared, column < head_dim
    head = kv_head * num_shared + row
    is_query = is_row[:, None] & is_column[None, :]
    query_at = q + sequence * q_sequence + head[:, None] * q_head + column[None, :]
    query = tl.load(query_at, mask=is_query, other=0.0)
    key_at = k + kv_head * k_head + column[:, None]
    value_at = v + kv_head * v_head + column[None, :]
    page_at = table + sequence * table_sequence
    largest = tl.full([num_rows], float("-inf"), tl.float32)
    total = tl.zeros([num_rows], tl.float32)
    if has_sinks:
        largest = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        total += 1.0
    attended = tl.zeros([num_rows, num_columns], tl.float32)
    start = 0
    if window > 0:
        start = tl.maximum(length - window, 0)
    for first in range(start // num_tokens * num_tokens, length, num_tokens):
        position = first + token
        is_token = (position >= start) & (position < length)
        page = tl.load(page_at + position // page_tokens, mask=is_token, other=0).to(tl.int64)
        offset = position % page_tokens
        is_key, is_value = is_column[:, None] & is_token[None, :], is_token[:, None] & is_column[None, :]
        key = tl.load(key_at + (page * k_page + offset * k_token)[None, :], mask=is_key, other=0.0)
        scores = tl.dot(query, key, input_precision="ieee") * scaling
        scores = tl.where(is_token[None, :], scores, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        weights, shrunk = tl.exp(scores - now_largest[:, None]), tl.exp(largest - now_largest)
        value = tl.load(value_at + (page * v_page + offset * v_token)[:, None], mask=is_value, other=0.0)
        products = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        attended = attended * shrunk[:, None] + products
        total = total * shrunk + tl.sum(weights, 1)
        largest = now_largest
    result = (attended / total[:, None]).to(out.dtype.element_ty)
    out_at = out + sequence * out_sequence + head[:, None] * out_head + column[None, :]
    tl.store(out_at, result, mask=is_query)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    x, weight, eps, out, x_row, out_row, num_columns: tl.constexpr, block: tl.constexpr
):
    """Normalise one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    is_column = column < num_columns
    values = tl.load(x + row * x_row + column, mask=is_column, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / num_columns + tl.load(eps))
    weights = tl.load(weight + column, mask=is_column, other=0.0)
    normed = (wide * scale).to(values.dtype).to(tl.float32) * weights.to(tl.float32)
    tl.store(out + row * out_row + column, normed.to(values.dtype), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(joined, joined_row, num_gated, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute a block of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    is_column = column < num_gated
    gate_at = joined + row * joined_row + column
    gates = tl.load(gate_at, mask=is_column, other=0.0)
    ups = tl.load(gate_at + num_gated, mask=is_column, other=0.0)
    wide = gates.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gates.dtype).to(tl.float32)
    tl.store(gate_at, (opened * ups.to(tl.float32)).to(gates.dtype), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    heads,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    keys,
    values,
    blocks,
    offsets,
    key_page,
    key_head,
    key_token,
    value_page,
    value_head,
    value_token,
    num_stored,
    heads_row,
    heads_head,
    cos_row,
    sin_row,
    num_queries,
    num_keys,
    half: tl.constexpr,
    block: tl.constexpr,
    has_norms: tl.constexpr,
):
    """Rotate and store one head (program axis 1) of one row (axis 0)."""
    row, head, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, block)
    is_column = column < half
    at = heads + row * heads_row + head * heads_head + column
    first = tl.load(at, mask=is_column, other=0.0)
    second = tl.load(at + half, mask=is_column, other=0.0)
    if head < num_queries + num_keys:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        if has_norms:
            weight = k_weight
            if head < num_queries:
                weight = q_weight
            squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 0)
            scale = tl.rsqrt(squares / (2 * half) + tl.load(eps))
            first_weight = tl.load(weight + column, mask=is_column, other=0.0)
            second_weight = tl.load(weight + half + column, mask=is_column, other=0.0)
            wide_first = (wide_first * scale).to(first.dtype).to(tl.float32) * first_weight.to(tl.float32)
            wide_second = (wide_second * scale).to(first.dtype).to(tl.float32) * second_weight.to(tl.float32)
            wide_first = wide_first.to(first.dtype).to(tl.float32)
            wide_second = wide_second.to(first.dtype).to(tl.float32)
        cos_at, sin_at = cos + row * cos_row + column, sin + row * sin_row + column
        first_cos = tl.load(cos_at, mask=is_column, other=0.0).to(tl.float32)
        second_cos = tl.load(cos_at + half, mask=is_column, other=0.0).to(tl.float32)
        first_sin = tl.load(sin_at, mask=is_column, other=0.0).to(tl.float32)
        second_sin = tl.load(sin_at + half, mask=is_column, other=0.0).to(tl.float32)
        first = (wide_first * first_cos + wide_second * first_sin).to(first.dtype)
        second = (wide_second * second_cos + wide_first * second_sin).to(first.dtype)
        tl.store(at, first, mask=is_column)
        tl.store(at + half, second, mask=is_column)
    if (head >= num_queries) & (row < num_stored):
        page, offset = tl.load(blocks + row), tl.load(offsets + row)
        to = keys + page * key_page + (head - num_queries) * key_head + offset * key_token
        if head >= num_queries + num_keys:
            value = head - num_queries - num_keys
            to = values + page * value_page + value * value_head + offset * value_token
        tl.store(to + column, first, mask=is_column)
        tl.store(to + half + column, second, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunks(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    largest,
    sums,
    logits_row,
    vocab,
    chunk: tl.constexpr,
    has_temperature: tl.constexpr,
):
    """Find the largest logit of a sequence (program axis 0) in a chunk (axis 1), and sum up `exp(x - it)`."""
    row, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * chunk + tl.arange(0, chunk)
    x = tl.load(logits + row * logits_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if has_temperature:
        x = x / tl.load(temperature + row)
    most = tl.max(x, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(largest + at, most)
    tl.store(sums + at, tl.sum(tl.exp(x - base), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    uniform,
    greedy,
    largest,
    sums,
    tokens,
    logprobs,
    logits_row,
    vocab,
    num_chunks,
    chunk: tl.constexpr,
    num_slots: tl.constexpr,
    has_temperature: tl.constexpr,
    has_greedy: tl.constexpr,
):
    """Draw the token of one sequence: the first whose cumulative probability exceeds `uniform`."""
    row, slot = tl.program_id(0).to(tl.int64), tl.arange(0, num_slots)
    is_slot = slot < num_chunks
    chunk_most = tl.load(largest + row * num_chunks + slot, mask=is_slot, other=float("-inf"))
    chunk_sums = tl.load(sums + row * num_chunks + slot, mask=is_slot, other=0.0)
    most = tl.max(chunk_most, 0)
    parts = (chunk_sums * tl.exp(chunk_most - most)).to(tl.float64)
    total = tl.sum(parts, 0)
    until = tl.cumsum(parts, 0)
    wanted = tl.load(uniform + row) * total
    is_last = slot == num_chunks - 1
    chosen = tl.min(tl.where((until > wanted) | is_last, slot, num_slots), 0)
    if has_greedy:
        is_greedy = tl.load(greedy + row) != 0
        likeliest = tl.min(tl.where(chunk_most == most, slot, num_slots), 0)
        chosen = tl.where(is_greedy, tl.minimum(likeliest, num_chunks - 1), chosen)
    before = tl.sum(tl.where(slot < chosen, parts, 0.0), 0)
    token = chosen * chunk + tl.arange(0, chunk)
    x = tl.load(logits + row * logits_row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    if has_temperature:
        x = x / tl.load(temperature + row)
    weights = tl.exp(x - most).to(tl.float64)
    # The chunk's sum was rounded: what its tokens lack of it is the last one's that has a probability.
    last = tl.max(tl.where(weights > 0, token, chosen * chunk), 0)
    is_drawn = (before + tl.cumsum(weights, 0) > wanted) & (weights > 0)
    if has_greedy:
        is_drawn = tl.where(is_greedy, x == most, is_drawn)
    found = tl.min(tl.where(is_drawn, token, last), 0)
    drawn_x = tl.sum(tl.where(token == found, x, 0.0), 0)
    tl.store(tokens + row, found.to(tl.float64))
    tl.store(logprobs + row, (drawn_x - most).to(tl.float64) - tl.log(total))
