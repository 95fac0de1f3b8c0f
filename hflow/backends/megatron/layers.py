"""Projection to q, k and v where there are fewer key-value heads than tensor ranks.

Megatron would cut the fused matrix regardless of heads and gather activations in every layer. Here each
rank holds its query heads and the one key-value head that they attend to; ranks with the same one sum
its gradient, so that the copies stay equal.
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
from torch.nn.functional import rms_norm


class RepeatedQkv(nn.Module):
    """Built and called as megatron's `linear_qkv` for a configuration with one key-value head a rank."""

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
        """Weights without values.

        Args:
            input_size: D.
            output_size: rows of q, k and v on all ranks together, copies included.
            config: megatron's `TransformerConfig`.
            bias: whether there are biases.
            tp_group: the tensor ranks.
            copies: those of them that hold the same key-value head.
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
            made.shared = shared  # type: ignore[attr-defined]  # megatron leaves it out of norms
            return made

        self.q_weight = parameter(q_rows, input_size)
        self.kv_weight = parameter(kv_rows, input_size, shared=is_copy)
        self.q_bias = parameter(q_rows) if bias else None
        self.kv_bias = parameter(kv_rows, shared=is_copy) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`[U, 1, D]` -> `[U, 1, (H / T + 2) E]`, and no bias that is left to add."""
        weight = torch.cat((self.q_weight, _summed(self.kv_weight, self.copies)))
        bias = None
        if self.q_bias is not None and self.kv_bias is not None:
            bias = torch.cat((self.q_bias, _summed(self.kv_bias, self.copies)))
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


_summed: Callable[[Tensor, ProcessGroup], Tensor] = _SumGradient.apply


# -------------------- RMS norm whose weight megatron's gradient sums know.


class RMSNorm(nn.Module):
    """`[..., D]` -> `[..., D]`; statistics are in fp32 whatever the input is in."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        """As megatron's layer specs build norms; `config` is its `TransformerConfig`."""
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism each tensor rank sees a part of the tokens: gradients are summed.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight
