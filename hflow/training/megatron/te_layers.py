"""Layers of Transformer Engine; imported only where they compute a model, as they need the package.

Megatron's layer specs of Transformer Engine fuse each norm with the linear layer after it. Attention itself
stays hflow's (`attention.py`): rows of a shared prompt are computed once, which no kernel for packed
sequences of Transformer Engine supports, and its context parallelism divides every sequence on its own,
hflow's the rows of a micro-batch. Where flash-attn is installed, both call the same kernel.

Axes: D hidden, n experts of this rank, R rows (tokens that were sent to this rank, once for each of its
experts), F rows of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelGroupedLinear,
    TEColumnParallelLinear,
    TENorm,
    TERowParallelGroupedLinear,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn.functional import linear

from hflow.training.megatron.layers import gated_silu
from hflow.types.kernels import FP8_NEEDS, Fp8Recipe

__all__ = ["SeparateExperts", "TEColumnParallelLinear", "TENorm", "layer_spec", "recipe_problem"]


def recipe_problem(recipe: Fp8Recipe) -> str:
    """Return Transformer Engine's reason why it does not multiply in FP8 on this device; empty if it does."""
    check = {
        Fp8Recipe.TENSORWISE: te.is_fp8_available,
        Fp8Recipe.BLOCKWISE: te.is_fp8_block_scaling_available,
        Fp8Recipe.MXFP8: te.is_mxfp8_available,
    }[recipe]
    is_available, reason = check(return_reason=True)
    return "" if is_available else reason.rstrip(".")


def layer_spec(has_qk_norm: bool) -> ModuleSpec:
    """Return megatron's layer with one MLP, which has a fused activation."""
    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=has_qk_norm, use_te_activation_func=True)


class SeparateExperts(nn.Module):
    """The experts of a rank, each with parameters of its own, whose products are computed together.

    It has the interface and the rows of `experts.GroupedExperts`.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: ProcessGroupCollection) -> None:
        """Allocate weights without initialising them."""
        super().__init__()
        options = {
            "config": config,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": True,
            "pg_collection": pg_collection,
        }
        rows, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.pad: Any = None
        self.unpad: Any = None
        if config.fp8:
            multiple = FP8_NEEDS[Fp8Recipe(config.fp8_recipe)].multiple
            self.pad = te.Fp8Padding(num_local_experts, multiple)
            self.unpad = te.Fp8Unpadding(num_local_experts, multiple)
        self.linear_fc1 = _with_empty_input(TEColumnParallelGroupedLinear)(
            num_local_experts,
            hidden,
            2 * rows,
            init_method=config.init_method,
            tp_comm_buffer_name="fc1",
            **options,
        )
        self.linear_fc2 = _with_empty_input(TERowParallelGroupedLinear)(
            num_local_experts,
            rows,
            hidden,
            init_method=config.output_layer_init_method,
            tp_comm_buffer_name="fc2",
            **options,
        )

    def forward(self, tokens: Tensor, per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """Compute `[R, D]` -> `[R, D]`, as `GroupedExperts.forward` does."""
        splits = per_expert.tolist()  # host: the dispatcher has copied it
        if self.pad is None or not len(tokens):
            return self._products(tokens, splits, weights), None
        padded, padded_splits = self.pad(tokens, splits)
        padded_weights, _ = self.pad(weights[:, None], splits)
        return self.unpad(self._products(padded, padded_splits, padded_weights[:, 0]), splits), None

    def _products(self, tokens: Tensor, splits: list[int], weights: Tensor) -> Tensor:
        activated = gated_silu(self.linear_fc1(tokens, splits)[0], weights)
        out: Tensor = self.linear_fc2(activated, splits)[0]
        return out


def _with_empty_input(grouped: type) -> type:
    """Return a grouped linear layer that also takes no rows at all.

    All of its weights take part in the backward pass, which waits for the gradients of all.
    """

    class Grouped(grouped):  # type: ignore[misc]
        def forward(self, x: Tensor, m_splits: list[int]) -> tuple[Tensor, None]:
            if len(x):
                out, _ = super().forward(x, m_splits)
                return out, None
            weights = (getattr(self, f"weight{i}") for i in range(self.num_gemms))
            return torch.cat([linear(x, weight) for weight in weights]), None

    return Grouped
