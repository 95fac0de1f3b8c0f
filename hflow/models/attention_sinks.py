"""Attention whose softmax has a score for attending to nothing: the sinks of gpt-oss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from typing_extensions import override

_FROM_THE_END = 2
"""The mask in which the last query sees all keys (`CustomMaskType` of torch)."""


class Kernel(ABC):
    """A kernel without sinks, with what it computes but the tensors.

    `sums` are the logarithms of the sums of the softmax, fp32, of the shape of `out` without its last axis.
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return a new tensor `out`, and `sums`."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v by that of `out`."""


@dataclass(frozen=True)
class VarlenKernel(Kernel):
    """torch's variable-length kernel; see `attention_kernels.varlen_attention`. Keys need not be repeated."""

    cumulative: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    scaling: float | None
    reached: tuple[int, int]
    """The tokens before a query that it attends to, -1 for all, and those behind it, 0."""

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            *(q, k, v, *self.cumulative, *self.longest, 0.0, self._is_whole, False), **self._options
        )
        return out, sums.T

    @override
    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)
        gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            *(gradient, q, k, v, out, sums.T.contiguous(), *self.cumulative, *self.longest),
            *(0.0, self._is_whole, of_dropout, of_dropout),
            **self._options,
        )
        return gradients

    @property
    def _is_whole(self) -> bool:
        return self.reached[0] < 0

    @property
    def _options(self) -> dict[str, Any]:
        before, after = self.reached
        return {"scale": self.scaling, "window_size_left": before, "window_size_right": after}


@dataclass(frozen=True)
class CpuKernel(Kernel):
    """SDPA's kernel of CPUs; see `attention_kernels.padded_attention`."""

    scaling: float | None
    mask: Tensor | None

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        attended: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(q, k, v, 0.0, self.mask is None), attn_mask=self.mask, scale=self.scaling
        )
        return attended

    @override
    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients: tuple[Tensor, Tensor, Tensor] = backward(
            *(gradient, q, k, v, out, sums, 0.0, self.mask is None), attn_mask=self.mask, scale=self.scaling
        )
        return gradients


@dataclass(frozen=True)
class EfficientKernel(Kernel):
    """SDPA's kernel of GPUs for fp32; see `attention_kernels.padded_attention`.

    Its axes are `[S, L, H, d]`. It has sums of a multiple of 32 queries, infinite where there is none.
    """

    scaling: float | None
    window: int | None

    @override
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, sums, *_ = torch.ops.aten._efficient_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)),
            *(None, None, None, None, None, 0.0, _FROM_THE_END),
            compute_log_sumexp=True,
            scale=self.scaling,
            window_size=self.window,
        )
        return out.transpose(1, 2), sums[..., : q.shape[2]]

    @override
    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, q, k, v, out = (x.transpose(1, 2) for x in (gradient, q, k, v, out))
        of_dropout = torch.empty(2, dtype=torch.int64, device=q.device)
        *gradients, _ = torch.ops.aten._efficient_attention_backward(
            *(gradient, q, k, v, None, out, None, None, q.shape[1], k.shape[1]),
            *(pad(sums, (0, -q.shape[1] % 32), value=torch.inf), 0.0, of_dropout, of_dropout),
            *(_FROM_THE_END, False),
            scale=self.scaling,
            window_size=self.window,
        )
        of_q, of_k, of_v = (x.transpose(1, 2) for x in gradients)
        return of_q, of_k, of_v


def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
    """Compute attention with sinks, by a kernel without: it keeps no scores.

    Args:
        q: queries, as the kernel takes them.
        k: keys.
        v: values.
        sinks: the score of each head's sink, of a shape that is expanded to that of `sums`.
        kernel: computes it.
    """
    attended: Tensor = _WithSinks.apply(q, k, v, sinks, kernel)  # type: ignore[no-untyped-call]
    return attended


class _WithSinks(torch.autograd.Function):
    """See `attend_with_sinks`.

    Of a query's scores `x_j`, a kernel computes `l = log sum_j exp(x_j)` and `o = sum_j exp(x_j - l) v_j`. A
    sink is one more score s, of a value 0. So with it `l' = log(exp(l) + exp(s))`, and `o' = exp(l - l') o`.

    From a gradient g, with `p_j = exp(x_j - l)`, a kernel's backward pass computes `p_j g` for `v_j`, and
    `p_j (g v_j - g o)` for `x_j`, where `g o` is `sum_k p_k g v_k`. That sum has no part of the sink, whose
    value is 0. So the kernel makes the gradients with sinks if it gets l' and o' in place of l and o. That of
    s is `exp(s - l') (0 - g o')`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kernel: Kernel) -> Tensor:
        out, sums = kernel.forward(q, k, v)
        with_sinks = torch.logaddexp(sums, sinks.to(sums.dtype))
        out *= (sums - with_sinks).exp_()[..., None]
        ctx.save_for_backward(q, k, v, out, with_sinks, sinks)
        ctx.kernel = kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, sinks = ctx.saved_tensors
        of_sinks = None
        if ctx.needs_input_grad[3]:
            products = (gradient * out).sum(-1, dtype=sums.dtype)
            weights = (sinks.to(sums.dtype) - sums).exp_()
            of_sinks = -(weights * products).sum_to_size(sinks.shape).to(sinks.dtype)
        return *ctx.kernel.backward(gradient, q, k, v, out, sums), of_sinks, None
