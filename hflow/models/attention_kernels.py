"""Calls of attention kernels. All attention of the backends and of the embedded engine is computed here.

Kernels know no sinks: `attention_sinks` makes results with sinks of theirs.

`hflow.types.kernels` chooses the kernel; `num_calls` counts the calls of each. After
`torch.use_deterministic_algorithms` all of them add in a fixed order, also in the backward pass: torch's own
by themselves, and flash-attn's because it is asked to. flash-attn-3 is not chosen then.

Axes: S sequences, T packed query tokens, K packed key tokens, L queries and M keys of each padded sequence,
H heads, G key-value heads (a divisor of H), d head size.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention

from hflow.base.devices import has_cuda_api, is_gpu
from hflow.models.attention_sinks import CpuKernel, EfficientKernel, VarlenKernel, attend_with_sinks
from hflow.models.dtypes import SAVED_DTYPES
from hflow.types.kernels import (
    FLASH_MODULES,
    AttentionKernel,
    decode_kernel,
    flash_module,
    flash_versions,
    packed_kernel,
)

num_calls: Counter[AttentionKernel] = Counter()
"""Calls of each kernel in this process, without the recomputations inside of kernels."""

# cuDNN's kernel, which SDPA prefers on Hopper, spends tens of milliseconds on each new pair of batch size and
# length, and keeps what it made. Decoding has a new pair at most steps.
torch.backends.cuda.enable_cudnn_sdp(False)

_VARLEN_GROUPS_QUERIES = "enable_gqa" in signature(varlen_attn).parameters
"""Whether torch's kernel takes fewer key heads than query heads, as it does from torch 2.12 on."""

_NAMES = {dtype: name for name, dtype in SAVED_DTYPES.items()}


class Reach(NamedTuple):
    """What a causal query attends to besides, or less than, all keys up to its own."""

    window: int | None = None
    """The last keys only, its own included; None: all."""
    sinks: Tensor | None = None
    """`[H]`: for each head, the score of attending to nothing (gpt-oss); None: heads have none."""


CAUSAL = Reach()
"""All keys up to a query's own."""


class StoredHeads(NamedTuple):
    """Places in a cache for the keys and values of the first N rows."""

    keys: Tensor
    """The keys of a layer, `[pages, K, P, d]`."""
    values: Tensor
    """The values, as `keys`."""
    blocks: Tensor
    """int64 `[N]`: the page of each row."""
    offsets: Tensor
    """int64 `[N]`: its place there."""


def kernel_of(device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel for packed sequences on a device.

    Raises:
        BackendError: if it is that of a package which was built for another torch.
    """
    installed, deterministic = flash_versions(), torch.are_deterministic_algorithms_enabled()
    asks = AttentionKernel.FLASH_ATTN_3 in installed and has_cuda_api(device.type)
    capability = torch.cuda.get_device_capability(device) if asks else None
    chosen = packed_kernel(device.type, _NAMES[dtype], capability, installed, deterministic=deterministic)
    if chosen.kernel in FLASH_MODULES:
        _flash_kernel(chosen.kernel)
    return chosen.kernel


def triton_kernels(device: torch.device) -> ModuleType | None:
    """Return hflow's Triton kernels (`decode_kernels`); None on devices where torch computes instead."""
    return import_module("hflow.models.decode_kernels") if has_cuda_api(device.type) else None


def varlen_attention(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scaling: float | None,
    reach: Reach = CAUSAL,
) -> Tensor:
    """Compute causal attention within each of S sequences: q `[T, H, d]`, k `[K, G, d]` -> `[T, H, w]`.

    The last query of a sequence attends to all of its keys, the one before it to all but the last, and so on.

    Args:
        kernel: `FLASH_ATTN_3`, `FLASH_ATTN` or `VARLEN`, which computes sinks in place of the others.
        q: queries.
        k: keys.
        v: values `[K, G, w]`; w is at most d, and smaller in latent attention.
        cumulative: int32 `[S + 1]` both: where the queries, and where the keys of each sequence begin.
        longest: most queries, and most keys of a sequence.
        scaling: factor of the scores; None for `d ** -0.5`.
        reach: what queries attend to.
    """
    if reach.sinks is not None:
        kernel = AttentionKernel.VARLEN  # see `packed_kernel`
    num_calls[kernel] += 1
    width, reached = v.shape[-1], (-1 if reach.window is None else reach.window - 1, 0)
    if width < q.shape[-1]:  # all of the kernels take one head size
        v = pad(v, (0, q.shape[-1] - width))
    if reach.sinks is not None:
        packed = VarlenKernel(cumulative, longest, scaling, reached)
        return attend_with_sinks(q, k, v, reach.sinks, packed)[..., :width]
    if kernel in FLASH_MODULES:
        flash = _flash_kernel(kernel)
        out: Tensor = flash(
            *(q, k, v, *cumulative, *longest),
            softmax_scale=scaling,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            window_size=reached,
        )
        return out[..., :width]
    assert kernel is AttentionKernel.VARLEN
    grouped: dict[str, Any] = {}
    if _VARLEN_GROUPS_QUERIES:
        grouped["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    attended = varlen_attn(q, k, v, *cumulative, *longest, scale=scaling, window_size=reached, **grouped)
    assert isinstance(attended, Tensor)
    return attended[..., :width]


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, mask: Tensor | None = None, reach: Reach = CAUSAL
) -> Tensor:
    """Compute attention of sequences of one length.

    Args:
        q: queries `[S, H, L, d]`.
        k: keys `[S, G, M, d]`.
        v: values `[S, G, M, w]`; w is at most d, and smaller in latent attention.
        scaling: factor of the scores; None for `d ** -0.5`.
        mask: additive mask, or one of `torch.nn.attention.bias`; None for causal attention, where L is M.
        reach: the sinks, with which a mask is additive, and the window, which a mask has too.

    Returns:
        `[S, H, L, w]`.
    """
    num_calls[AttentionKernel.SDPA] += 1
    width = v.shape[-1]
    if width < q.shape[-1]:  # the kernel of CPUs takes one head size, and the other one stores all scores
        v = pad(v, (0, q.shape[-1] - width))
    num_shared = q.shape[1] // k.shape[1]
    if num_shared > 1 and is_gpu(q.device.type) and q.dtype is torch.float32:
        # No fused kernel has grouped queries in fp32, and the other one stores all scores.
        k, v = (x.repeat_interleave(num_shared, dim=1) for x in (k, v))
    if reach.sinks is not None:
        on_gpu = is_gpu(q.device.type)
        kernel = EfficientKernel(scaling, reach.window) if on_gpu else CpuKernel(scaling, mask)
        return attend_with_sinks(q, k, v, reach.sinks[:, None], kernel)[..., :width]
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out[..., :width]


def reaching_attention(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, reach: Reach, mask: Tensor | None = None
) -> Tensor:
    """Compute causal attention of sequences of one length: as `padded_attention`, with L <= M.

    The last query sees all keys, the one before it all but the last, and so on.

    Args:
        q: queries `[S, H, L, d]`.
        k: keys `[S, G, M, d]`.
        v: values, as keys.
        scaling: factor of the scores; None for `d ** -0.5`.
        reach: what queries attend to.
        mask: the mask `[L, M]` without windows, as in `padded_attention`, if L is less than M.
    """
    (window, sinks), num, length = reach, q.shape[2], k.shape[2]
    window = None if window is None or window >= length else window
    assert num == length or mask is not None, "fewer queries than keys need a mask"
    if window is not None or (sinks is not None and isinstance(mask, CausalBias)):
        positions = torch.arange(length - num, length, device=q.device)
        mask = additive_mask(positions, length, q.dtype, window).view(1, 1, num, length)
    return padded_attention(q, k, v, scaling, mask, Reach(window, sinks))


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    scaling: float,
    reach: Reach = CAUSAL,
) -> Tensor:
    """Compute attention of one query per sequence over its cached tokens, which are in pages of P tokens.

    Shapes alone say what is launched, so that a CUDA graph can hold it. Without a kernel that reads pages, as
    for values of another size, these are copied to one piece per sequence.

    Args:
        q: queries `[S, H, d]`.
        k: keys `[pages, G, P, d]`.
        v: values, as keys; of another size in latent attention.
        table: int32 `[S, N]`: the pages of each sequence, in order. Those behind its tokens are not read.
        lengths: int32 `[S]`, at least 1: the cached tokens of each sequence, its last one included.
        scaling: factor of the scores.
        reach: what queries attend to.

    Returns:
        `[S, H, d]`.
    """
    if v.shape == k.shape and (kernels := triton_kernels(q.device)) is not None:
        num_calls[AttentionKernel.TRITON] += 1
        attended: Tensor = kernels.triton_decode_attention(q, k, v, table, lengths, scaling, reach)
        return attended
    k, v = (x[table].transpose(1, 2).flatten(2, 3) for x in (k, v))
    mask = additive_mask(lengths - 1, k.shape[2], q.dtype, reach.window)
    return cached_attention(q, k, v, mask, scaling, reach.sinks)


def additive_mask(positions: Tensor, length: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return a mask `[N, 1, 1, length]`: 0 up to each row's position, or in the window that ends there.

    It is minus infinity elsewhere.
    """
    keys = torch.arange(length, device=positions.device)
    is_outside = keys > positions[:, None]
    if window is not None:
        is_outside = is_outside | (keys <= positions[:, None] - window)
    zero = torch.zeros((), dtype=dtype, device=positions.device)
    return torch.where(is_outside, float("-inf"), zero)[:, None, None, :]


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute attention of one query per sequence: q `[S, H, d]`, k and v `[S, G, M, d]` -> `[S, H, d]`.

    Query heads that share keys become rows of one product, so that keys need not be repeated.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: additive, `[S, 1, 1, M]`.
        scaling: factor of the scores.
        sinks: see `Reach`.
    """
    num_sequences, num_kv_heads, length, head_dim = k.shape
    if sinks is not None or decode_kernel(q.device.type, _NAMES[q.dtype]) is AttentionKernel.PRODUCTS:
        num_calls[AttentionKernel.PRODUCTS] += 1
        num_products = num_sequences * num_kv_heads
        grouped = q.reshape(num_products, -1, head_dim)
        masks = mask[:, 0].expand(-1, num_kv_heads, -1).reshape(num_products, 1, length)
        keys, values = k.view(num_products, length, head_dim), v.view(num_products, length, -1)
        scores = torch.baddbmm(masks, grouped, keys.transpose(1, 2), alpha=scaling)
        if sinks is not None:
            of_rows = sinks.to(q.dtype).view(num_kv_heads, -1, 1).repeat(num_sequences, 1, 1)
            scores = torch.cat((scores, of_rows), dim=-1)
        out = torch.bmm(scores.softmax(-1)[..., :length], values)
    else:
        out = padded_attention(q.reshape(num_sequences, num_kv_heads, -1, head_dim), k, v, scaling, mask)
    return out.reshape(*q.shape[:2], -1)


@cache
def _flash_kernel(kernel: AttentionKernel) -> Any:
    """Return the function of a kernel in `FLASH_MODULES`.

    Raises:
        BackendError: if its package was built for another torch.
    """
    return flash_module(kernel).flash_attn_varlen_func
