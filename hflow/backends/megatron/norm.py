"""RMS norm whose weight megatron's gradient sums know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm


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
