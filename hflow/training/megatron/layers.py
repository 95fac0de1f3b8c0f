"""Layers that replace megatron's: a q, k, v projection for few key-value heads, a norm, a gated activation.

Axes: U computed tokens, D hidden, H heads, E head size, F rows of an MLP on this rank, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.layers import (
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import gelu, rms_norm, silu
from typing_extensions import override


class RepeatedQkv(nn.Module):
    """Projection to q, k and v where there are fewer key-value heads than tensor ranks.

    It has the interface of megatron's `linear_qkv`. Megatron would split the fused matrix regardless of heads
    and gather activations in every layer. Here each rank holds its query heads and the one key-value head
    that they use. Ranks with the same key-value head sum its gradient, so that the copies stay equal.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        bias: bool,
        tp_group: ProcessGroup,
        copies: ProcessGroup,
        **_: Any,
    ) -> None:
        """Allocate weights without initialising them.

        Args:
            output_size: rows of q, k and v on all ranks together, copies included.
            copies: the tensor ranks that hold the same key-value head.
        """
        super().__init__()
        self.tp_group, self.copies = tp_group, copies
        self.sequence_parallel = config.sequence_parallel
        kv_rows = 2 * config.kv_channels
        q_rows = output_size // tp_group.size() - kv_rows
        is_copy = copies.rank() > 0

        def parameter(*shape: int, shared: bool = False) -> nn.Parameter:
            made = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(made, True, 0, 1)
            made.shared = shared  # type: ignore[attr-defined]  # excludes it from gradient norms
            return made

        self.q_weight = parameter(q_rows, input_size)
        self.kv_weight = parameter(kv_rows, input_size, shared=is_copy)
        self.q_bias = parameter(q_rows) if bias else None
        self.kv_bias = parameter(kv_rows, shared=is_copy) if bias else None

    @property
    def weight(self) -> Tensor:
        """The rows of q, k and v, `[(H / T + 2) E, D]`."""
        return torch.cat((self.q_weight, self.kv_weight))

    @property
    def bias(self) -> Tensor | None:
        """The biases of q, k and v, `[(H / T + 2) E]`."""
        if self.q_bias is None or self.kv_bias is None:
            return None
        return torch.cat((self.q_bias, self.kv_bias))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Project `[U, 1, D]` -> `[U, 1, (H / T + 2) E]`; the second result, a bias still to add, is None."""
        weight = torch.cat((self.q_weight, sum_gradient(self.kv_weight, self.copies)))
        bias = None
        if self.q_bias is not None and self.kv_bias is not None:
            bias = torch.cat((self.q_bias, sum_gradient(self.kv_bias, self.copies)))
        linear = (
            linear_with_grad_accumulation_and_async_allreduce
            if weight.requires_grad
            else linear_with_frozen_weight
        )
        out = linear(
            input=x,
            weight=weight,
            bias=bias,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=not self.sequence_parallel,
            sequence_parallel=self.sequence_parallel,
            tp_group=self.tp_group,
        )
        return out, None


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks that hold copies."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copies: ProcessGroup) -> Tensor:
        ctx.copies = copies
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.copies)
        return gradient, None


sum_gradient: Callable[[Tensor, ProcessGroup], Tensor] = _SumGradient.apply
"""Return a weight whose gradient is summed over the ranks that hold copies of it."""


class RMSNorm(nn.Module):
    """RMS norm `[..., D]` -> `[..., D]` with fp32 statistics, marked for megatron's gradient sums."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        """Take the arguments of megatron's layer specs; `config` is its `TransformerConfig`."""
        super().__init__()
        self.eps, self.is_centred = eps, config.layernorm_zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each tensor rank has a part of the tokens, so gradients must be summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        normal = rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        if self.is_centred:
            return (normal * (1.0 + self.weight.float())).to(x.dtype)
        return normal.to(x.dtype) * self.weight


class NormedSum(nn.Module):
    """Adds the output of attention or an MLP to the residual, after a norm of its own (Gemma).

    It has the interface of megatron's `self_attn_bda` and `mlp_bda`.
    """

    def __init__(self, config: Any) -> None:
        """Take megatron's `TransformerConfig`."""
        super().__init__()
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, is_fused: bool) -> Callable[..., Tensor]:
        """Return the function that adds; the arguments are for dropout and kernels."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        normal: Tensor = self.norm(output if bias is None else output + bias)
        return residual + normal


class GatedSilu(nn.Module):
    """`gated_silu` as the activation of megatron's MLP, which keeps five tensors of F rows with its own."""

    def __init__(self, config: Any) -> None:
        """Take the argument that megatron passes; there is nothing to configure."""
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Activate `[..., 2 F]` -> `[..., F]`."""
        return gated_silu(x, None)


class GatedGelu(GatedSilu):
    """The same with GELU, in its approximation by tanh, in place of SiLU."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        return gated_gelu(x, None, True)


class _Gated(torch.autograd.Function):
    """Keeps its input, and computes what the gradient needs of it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, is_gelu: bool = False) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.is_gelu = is_gelu
        gate, up = x.chunk(2, dim=-1)
        out = (gelu(gate, approximate="tanh") if is_gelu else silu(gate)).mul_(up)
        return out if weights is None else out.mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weights = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        activated = gelu(gate, approximate="tanh") if ctx.is_gelu else silu(gate)
        of_weights = None
        if weights is not None:
            of_weights = (activated * up).mul_(grad).sum(-1)
            grad = grad * weights[:, None]
        of_input = torch.empty_like(x)
        of_gate, of_up = of_input.chunk(2, dim=-1)
        torch.mul(grad, activated, out=of_up)
        of_activated = torch.mul(grad, up, out=activated)
        if ctx.is_gelu:
            torch.ops.aten.gelu_backward(of_activated, gate, approximate="tanh", grad_input=of_gate)
        else:
            torch.ops.aten.silu_backward(of_activated, gate, grad_input=of_gate)
        return of_input, of_weights, None


gated_gelu: Callable[[Tensor, Tensor | None, bool], Tensor] = _Gated.apply
"""Compute as `gated_silu`, with GELU if the last argument is true."""
gated_silu: Callable[[Tensor, Tensor | None], Tensor] = _Gated.apply
"""Compute silu(gate) * up of `[..., 2 F]`, gate first: `[..., F]`. With weights, `[R]` for an input
`[R, 2 F]`, each row is multiplied by its own."""
