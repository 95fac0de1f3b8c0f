"""A Triton kernel of attention for one query per sequence over its cached tokens.

Each program computes the query heads of a sequence that share keys. It reads these keys and values once, only
as many as the sequence has, and adds up by the softmax with a running maximum (Milakov and Gimelshein 2018).
It finds them page by page through the sequence's row of a table (Kwon et al. 2023, "PagedAttention").
Its launch depends on shapes alone, so a CUDA graph can hold it.

This module imports Triton, which builds of torch for CUDA install.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_TOKENS = 64
"""Cached tokens that a program reads at once."""
_MIN_ROWS = 16
"""Fewest rows of a product on tensor cores."""


def triton_decode_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """Compute attention of one query per sequence; see `attention_kernels.decode_attention`."""
    num_sequences, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    num_shared = num_heads // num_kv_heads
    out = torch.empty_like(q)
    strides = (table.stride(0), *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:2])
    _attend[(num_sequences, num_kv_heads)](
        *(q, k, v, table, lengths, out, scaling, *strides),
        num_shared=num_shared,
        num_rows=max(_MIN_ROWS, triton.next_power_of_2(num_shared)),
        head_dim=head_dim,
        num_columns=max(_MIN_ROWS, triton.next_power_of_2(head_dim)),
        num_tokens=_NUM_TOKENS,
        page_tokens=k.shape[2],
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    table,
    lengths,
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
):
    """Attend with the query heads of one sequence (program axis 0) that share one key head (axis 1)."""
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
    attended = tl.zeros([num_rows, num_columns], tl.float32)
    for first in range(0, length, num_tokens):
        position = first + token
        is_token = position < length
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
