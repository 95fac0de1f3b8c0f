"""Megatron's configuration of a model, and the submodules of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from hflow.backends.interface import ModelSettings
from hflow.backends.megatron.attention import PackedAttention
from hflow.backends.megatron.hf_mapping import stage_layers
from hflow.backends.megatron.layers import RepeatedQkv, RMSNorm
from hflow.backends.megatron.model_dims import ModelDims
from hflow.backends.megatron.parallel_state import ParallelState

_ALWAYS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": silu,
    "add_bias_linear": False,  # but see `block_spec`
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Micro-batches differ in length; the dispatcher is that of experts, which there are none of.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    # Losses are sums with weights of their own: gradients are summed, and divided by nothing.
    "calculate_per_token_loss": True,
    # Kernels of Apex and Transformer Engine, which are not needed.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}
_RECOMPUTE: Mapping[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def transformer_config(
    dims: ModelDims, epsilon: float, settings: ModelSettings, dtype: torch.dtype, parallel: ParallelState
) -> TransformerConfig:
    """Megatron's configuration for one rank.

    Args:
        dims: of the model.
        epsilon: of its norms.
        settings: what recomputation and sequence parallelism are taken from.
        dtype: what the model computes in.
        parallel: this rank's place.
    """
    return TransformerConfig(
        **_ALWAYS,
        cuda_graph_scope=[],
        **(_RECOMPUTE if settings.activation_checkpointing else {}),
        num_layers=dims.num_layers,
        hidden_size=dims.hidden,
        ffn_hidden_size=dims.intermediate,
        num_attention_heads=dims.num_heads,
        num_query_groups=max(dims.num_kv_heads, parallel.tensor),  # with copies
        kv_channels=dims.head_dim,
        layernorm_epsilon=epsilon,
        qk_layernorm=dims.has_qk_norm,
        add_qkv_bias=dims.has_qkv_bias,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipe,
        pipeline_model_parallel_layout=_StageLayers(dims.num_layers, parallel.pipe, parallel.p),
        sequence_parallel=parallel.tensor > 1 and _shares_tokens(settings),
        # Over NCCL two stages that send to each other at once must do so in one batch; gloo has none.
        batch_p2p_comm=settings.device == "cuda",
        init_method=_leave,
        output_layer_init_method=_leave,
        embedding_init_method=_leave,
    )


def block_spec(dims: ModelDims, parallel: ParallelState) -> TransformerBlockSubmodules:
    """The layers of this rank's stage; making groups for copied key-value heads is a collective."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=dims.has_qk_norm)
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    parts.mlp.params["ffn_hidden_size"] = dims.intermediate
    attention.core_attention = PackedAttention
    if dims.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if dims.num_kv_heads < parallel.tensor:
        copies = parallel.tensor_block(parallel.tensor // dims.num_kv_heads)
        attention.linear_qkv = partial(RepeatedQkv, copies=copies)
    if dims.has_out_bias:
        attention.linear_proj = _biased(RowParallelLinear)
    if dims.has_mlp_bias:
        parts.mlp.submodules.linear_fc1 = _biased(ColumnParallelLinear)
        parts.mlp.submodules.linear_fc2 = _biased(RowParallelLinear)
    first, last = stage_layers(dims.num_layers, parallel.pipe)[parallel.p]
    return TransformerBlockSubmodules(layer_specs=[layer] * (last - first), layer_norm=RMSNorm)


class _StageLayers(PipelineParallelLayerLayout):  # type: ignore[misc]  # megatron has no types
    """The plan's split of layers over stages; asks no global state for the stage."""

    def __init__(self, num_layers: int, num_stages: int, stage: int) -> None:
        rows = [["decoder"] * (last - first) for first, last in stage_layers(num_layers, num_stages)]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, num_stages)
        self._stage = stage

    def get_layer_offset(self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None) -> int:
        """Index of the stage's first layer in the model."""
        offset: int = super().get_layer_offset(layer_type, vp_stage, self._stage)
        return offset


def _biased(linear: type) -> type:
    """A parallel linear layer with a bias, where megatron's one switch for all of them is off."""

    class Biased(linear):  # type: ignore[misc]
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **(options | {"bias": True}))

    return Biased


def _shares_tokens(settings: ModelSettings) -> bool:
    """Whether sequence parallelism is on: a reduce-scatter and an all-gather for each all-reduce."""
    if settings.sequence_parallel is None:
        return settings.device == "cuda"
    return settings.sequence_parallel


def _leave(weight: Tensor) -> None:
    """Initialise nothing: all weights are loaded."""
