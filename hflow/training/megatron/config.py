"""Megatron's configuration of a model, and the submodules of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import silu

from hflow.base.devices import collective_backend, is_gpu
from hflow.models.settings import ModelSettings
from hflow.shapes.layout import stage_layers
from hflow.shapes.model_shape import Experts, ModelShape, torch_only
from hflow.training.megatron.attention import PackedAttention
from hflow.training.megatron.experts import BiasedExperts, GroupedExperts, Router
from hflow.training.megatron.hf_mapping import copies_key_value_heads
from hflow.training.megatron.latent_attention import PackedLatentAttention
from hflow.training.megatron.layers import GatedGelu, GatedSilu, NormedSum, RepeatedQkv, RMSNorm
from hflow.training.megatron.parallel_state import ParallelState
from hflow.training.megatron.supported_models import LayerMath
from hflow.types.kernels import Fp8Recipe, LayerKernels

_FIXED_OPTIONS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": silu,
    "use_te_activation_func": True,  # the layer's own, of `GatedSilu`
    "add_bias_linear": False,  # `block_spec` adds the biases that a model has
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Micro-batches differ in length. Megatron then requires this dispatcher, also without experts.
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    # The loss is a weighted sum with global denominators, so gradients are summed and not divided.
    "calculate_per_token_loss": True,
    # The cache would keep weights in FP8 between micro-batches, and after the last one, when an engine may
    # need the memory. Without it each pass quantises what it reads, in about a hundredth of its time, and
    # products of a backward pass are always added to gradients, and never replace them.
    "disable_parameter_transpose_cache": True,
    # Kernels for layers that hflow replaces, or that are fused in another way.
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
    model: ModelShape, math: LayerMath, settings: ModelSettings, dtype: torch.dtype, parallel: ParallelState
) -> TransformerConfig:
    """Return megatron's configuration for one rank.

    The settings select recomputation, sequence parallelism and FP8.
    """
    return TransformerConfig(
        **_FIXED_OPTIONS,
        gradient_accumulation_fusion=_fuses_gradients(settings),
        **({} if model.experts is None else _expert_options(model.experts)),
        cuda_graph_scope=[],
        **(_RECOMPUTE if settings.activation_checkpointing else {}),
        **_fp8_options(settings),
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.intermediate,
        num_attention_heads=model.num_heads,
        num_query_groups=max(model.num_kv_heads, parallel.tensor),  # copies included
        kv_channels=model.head_dim,
        layernorm_epsilon=math.epsilon,
        layernorm_zero_centered_gamma=math.has_centred_norms,
        qk_layernorm=model.has_qk_norm,
        add_qkv_bias=model.has_qkv_bias,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipe,
        pipeline_model_parallel_layout=_StageLayers(model.num_layers, parallel.pipe, parallel.p),
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1 and _uses_sequence_parallel(settings, model),
        # Over NCCL, two stages that send to each other must do so in one batch; gloo has no batches.
        batch_p2p_comm=collective_backend(settings.device) == "nccl",
        batch_p2p_sync=False,  # streams wait for what is received; the host need not
        init_method=_skip_init,
        output_layer_init_method=_skip_init,
        embedding_init_method=_skip_init,
    )


def block_spec(
    config: TransformerConfig,
    model: ModelShape,
    math: LayerMath,
    parallel: ParallelState,
    kernels: LayerKernels,
) -> TransformerBlockSubmodules:
    """Return the layers of this rank's stage. Making groups for copied key-value heads is a collective."""
    copies, parts = None, _parts(model, math, kernels)
    if copies_key_value_heads(model, parallel.tensor):
        copies = parallel.tensor_block(parallel.tensor // model.num_kv_heads)
    dense = mixed = _layer_spec(config, model, math, copies, parts)
    if model.experts is not None:
        assert math.routing is not None
        router = partial(Router, model, math.routing)
        layer = _layer_spec(config, model, math, copies, parts)
        mixed = _with_experts(layer, router, parts, model.experts.shared > 0)
    layers = range(*stage_layers(model.num_layers, parallel.pipe)[parallel.p])
    specs = [mixed if model.has_experts(layer) else dense for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.norm)


@dataclass(frozen=True)
class LayerParts:
    """What differs between layers of different kernels. Attention and the router are hflow's in all."""

    spec: Callable[[bool], ModuleSpec]
    """Return megatron's layer with one MLP, with or without norms of q and k."""
    norm: Any
    experts: Any
    linear: type
    """A linear layer without a norm, whose outputs tensor ranks divide."""


def _parts(model: ModelShape, math: LayerMath, kernels: LayerKernels) -> LayerParts:
    if kernels is LayerKernels.TRANSFORMER_ENGINE:
        assert not torch_only(model), "a plan chooses torch's kernels"
        from hflow.training.megatron import te_layers

        return LayerParts(
            te_layers.layer_spec,
            te_layers.TENorm,
            te_layers.SeparateExperts,
            te_layers.TEColumnParallelLinear,
        )
    experts: Any = GroupedExperts
    if math.clamp is not None:
        experts = ModuleSpec(BiasedExperts, params={"clamp": math.clamp})
    return LayerParts(_torch_spec, RMSNorm, experts, megatron_layers.ColumnParallelLinear)


def _torch_spec(has_qk_norm: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=has_qk_norm)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.mlp.submodules.activation_func = GatedSilu
    return layer


def _layer_spec(
    config: TransformerConfig,
    model: ModelShape,
    math: LayerMath,
    copies: ProcessGroup | None,
    parts: LayerParts,
) -> ModuleSpec:
    """Return the submodules of a layer with one MLP, computed by the modules `parts`.

    `copies` are the tensor ranks that hold the same key-value head; None if each head is on one of them.
    """
    layer = parts.spec(model.has_qk_norm)
    modules, attention = layer.submodules, layer.submodules.self_attention.submodules
    modules.mlp.params["ffn_hidden_size"] = model.intermediate
    core = {"math": math, "has_sinks": model.has_sinks}
    attention.core_attention = ModuleSpec(PackedAttention, params=core)
    if model.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = parts.norm
    if copies is not None:
        attention.linear_qkv = partial(RepeatedQkv, copies=copies)
        modules.input_layernorm = parts.norm
    if model.has_out_bias:
        attention.linear_proj = _biased(attention.linear_proj)
    if model.latent is not None:
        modules.self_attention = ModuleSpec(PackedLatentAttention, params={"model": model, "math": math})
    if math.has_gelu:
        modules.mlp.submodules.activation_func = GatedGelu
    if model.has_post_norms:
        modules.self_attn_bda = modules.mlp_bda = ModuleSpec(NormedSum, params={"config": config})
    if model.has_mlp_bias:
        mlp = modules.mlp.submodules
        mlp.linear_fc1, mlp.linear_fc2 = _biased(mlp.linear_fc1), _biased(mlp.linear_fc2)
    return layer


def _expert_options(experts: Experts) -> dict[str, Any]:
    return {
        "num_moe_experts": experts.num,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": True,  # megatron requires it for one expert per token
        "moe_shared_expert_intermediate_size": experts.shared or None,
        "moe_shared_expert_gate": experts.has_shared_gate,
    }


def _with_experts(
    layer: ModuleSpec, router: Callable[..., Router], parts: LayerParts, has_shared: bool
) -> ModuleSpec:
    """Return the layer with experts in place of its MLP. The router needs the norm's output too."""
    modules = MoESubmodules(experts=parts.experts, router=router)
    if has_shared:
        mlp = replace(layer.submodules.mlp.submodules, linear_fc1=parts.linear)
        modules.shared_experts = ModuleSpec(module=SharedExpertMLP, submodules=mlp)
    layer.submodules.mlp = ModuleSpec(module=MoELayer, submodules=modules)
    layer.submodules.pre_mlp_layernorm = parts.norm
    return layer


class _StageLayers(PipelineParallelLayerLayout):  # type: ignore[misc]  # megatron has no types
    """The split of layers over stages that the plan uses, without megatron's global state."""

    def __init__(self, num_layers: int, num_stages: int, stage: int) -> None:
        rows = [["decoder"] * (last - first) for first, last in stage_layers(num_layers, num_stages)]
        rows[0].insert(0, "embedding")
        rows[-1].append("loss")
        super().__init__(rows, num_stages)
        self._stage = stage

    def get_layer_offset(self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None) -> int:
        """Return the index in the model of the stage's first layer."""
        offset: int = super().get_layer_offset(layer_type, vp_stage, self._stage)
        return offset


def _biased(linear: type) -> type:
    """Return a parallel linear layer that has a bias although megatron's one switch for all layers is off."""

    class Biased(linear):  # type: ignore[misc]
        def __init__(self, *sizes: int, **options: Any) -> None:
            super().__init__(*sizes, **(options | {"bias": True}))

    return Biased


def _fp8_options(settings: ModelSettings) -> dict[str, Any]:
    """Return the options by which megatron calls each layer in Transformer Engine's context for FP8.

    The embedding, the output matrix and the router are hflow's or megatron's own, and stay out of it.
    """
    if settings.fp8 is None:
        return {}
    recipe = Fp8Recipe(settings.fp8)
    assert LayerKernels(settings.kernels) is LayerKernels.TRANSFORMER_ENGINE
    return {"fp8": "hybrid" if recipe is Fp8Recipe.TENSORWISE else "e4m3", "fp8_recipe": recipe.value}


def _uses_sequence_parallel(settings: ModelSettings, model: ModelShape) -> bool:
    """Return whether a reduce-scatter and an all-gather replace each all-reduce.

    Each tensor rank sends its own tokens to experts, so models with experts always use it.
    """
    if model.experts is not None:
        return True
    if settings.sequence_parallel is None:
        return is_gpu(settings.device)
    return settings.sequence_parallel


def _fuses_gradients(settings: ModelSettings) -> bool:
    """Return whether products of a backward pass are added to the fp32 gradients as they are computed.

    Transformer Engine does so by itself, but megatron turns it on only where Apex's extension is installed.
    """
    of_te = LayerKernels(settings.kernels) is LayerKernels.TRANSFORMER_ENGINE
    has_extension: bool = megatron_layers._grad_accum_fusion_available
    return of_te and settings.trainable and has_extension


def _skip_init(weight: Tensor) -> None:
    """Leave a weight uninitialised, as all weights are loaded."""
