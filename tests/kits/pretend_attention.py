"""The flash kernels of torch, computed densely on the CPU for the pretend accelerator.

They refuse the dtypes, head sizes and index types that CUDA's kernels refuse. Stand-ins for packages compute
with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from hflow.types.kernels import AttentionKernel, head_size_problem

SIGNATURES = Path(__file__).parents[1] / "fixtures" / "signatures.json"


def stand_in(kernel: AttentionKernel) -> Callable[..., Tensor]:
    """Return a stand-in for the function of a package: it takes the package's parameters, and no others."""
    packages = json.loads(SIGNATURES.read_text()).items()
    (of_package,) = (functions for name, functions in packages if name.startswith(f"{kernel} "))
    names = of_package["flash_attn_varlen_func"]
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])

    def flash_attn_varlen_func(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind_partial(*args, **kwargs).arguments
        q, k, v = (given.pop(name) for name in "qkv")
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        places = [given.pop(f"{name}_{x}") for name in ("cu_seqlens", "max_seqlen") for x in "qk"]
        scale, window = given.pop("softmax_scale"), given.pop("window_size")
        assert given == {"causal": True, "deterministic": False}
        return varlen_attn(q, k, v, *places, scale=scale, window_size=window)

    return flash_attn_varlen_func


class _Sequence(NamedTuple):
    """A sequence's queries and keys in fp32, by head, and what the forward pass computes of them."""

    queries: slice
    keys: slice
    q: Tensor
    k: Tensor
    """Keys, repeated for the query heads that share them."""
    v: Tensor
    scores: Tensor
    """`[H, L, M]`, negative infinity where a query does not see a key."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the output `[T, H, d]`, and the logarithms of the softmax's sums `[H, T]`."""
    out, sums = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for one in _sequences(q, k, v, starts, scale, window):
        out[one.queries] = (one.scores.softmax(-1) @ one.v).transpose(0, 1).to(out.dtype)
        sums[:, one.queries] = one.scores.logsumexp(-1)
    return out, sums


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    starts: tuple[Tensor, Tensor],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, as the kernels compute them from `out` and `sums`.

    Query heads that share a key head add theirs up.
    """
    results = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for one in _sequences(q, k, v, starts, scale, window):
        of_out, attended = (x[one.queries].transpose(0, 1).float() for x in (gradient, out))
        weights = (one.scores - sums[:, one.queries, None]).exp()
        of_scores = weights * (of_out @ one.v.mT - (of_out * attended).sum(-1, keepdim=True)) * scale
        parts = (of_scores @ one.k, of_scores.mT @ one.q, weights.mT @ of_out)
        for result, part, rows in zip(results, parts, (one.queries, one.keys, one.keys), strict=True):
            heads = result.shape[1]
            result[rows] = part.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
    of_q, of_k, of_v = (result.to(q.dtype) for result in results)
    return of_q, of_k, of_v


def _sequences(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], scale: float, window: int | None
) -> Iterator[_Sequence]:
    num_shared = q.shape[1] // k.shape[1]
    of_queries, of_keys = (x.tolist() for x in starts)
    for i in range(len(of_queries) - 1):
        queries, keys = slice(*of_queries[i : i + 2]), slice(*of_keys[i : i + 2])
        one_q = q[queries].transpose(0, 1).float()
        one_k, one_v = (x[keys].transpose(0, 1).float().repeat_interleave(num_shared, 0) for x in (k, v))
        scores = one_q @ one_k.mT * scale
        num_queries, num_keys = scores.shape[1:]
        ones, last = torch.ones(num_queries, num_keys, dtype=torch.bool), num_keys - num_queries
        unseen = ones.triu(last + 1)
        if window is not None:
            unseen |= ones.tril(last - window)
        yield _Sequence(queries, keys, one_q, one_k, one_v, scores.masked_fill(unseen, -torch.inf))


def check_flash(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int]
) -> None:
    """Refuse what the variable-length kernel refuses."""
    problem = head_size_problem(AttentionKernel.VARLEN, q.shape[-1])
    if problem is not None or not q.shape[-1] == k.shape[-1] == v.shape[-1]:
        raise RuntimeError(f"heads of sizes {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]}: {problem}")
    if {x.dtype for x in (q, k, v)} not in ({torch.bfloat16}, {torch.float16}):
        raise RuntimeError(f"flash attention got {q.dtype}, {k.dtype} and {v.dtype}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError("the last dimension of queries, keys and values must be contiguous")
    for x, rows, most in zip(starts, (q, k), longest, strict=True):
        if x.dtype != torch.int32 or not x.is_contiguous():
            raise RuntimeError(f"places of sequences are int32, not {x.dtype}")
        if int(x[-1]) != len(rows) or int(x.diff().max()) > most:
            raise RuntimeError(f"sequences begin at {x.tolist()}, but there are {len(rows)} rows")
