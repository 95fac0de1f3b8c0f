"""The dimensions of a model that megatron can build, read from its Hugging Face config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from transformers import PreTrainedConfig

from hflow.base.errors import BackendError
from hflow.models.expert_tensors import EXPERT_FAMILIES

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *EXPERT_FAMILIES)
"""Values of `model_type` whose layers megatron's GPT model can compute."""

_ROPES = ("default", "linear", "llama3")
"""Rotary embeddings with one vector of frequencies for all sequence lengths."""


@dataclass(frozen=True)
class ExpertDims:
    """Dimensions of the layers whose MLP is a mixture of experts."""

    num: int
    per_token: int
    """How many of them compute with each token."""
    intermediate: int
    normalizes: bool
    """Whether the weights of a token's experts add up to 1. Otherwise they are probabilities among all."""
    layers: frozenset[int]
    """The layers that have experts. Others have one MLP."""


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a model, and which weights its layers have."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """Whether the output matrix is the embedding."""
    has_qkv_bias: bool
    has_out_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    head: str
    """`lm`, `value` or `score`."""
    experts: ExpertDims | None = None

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer's MLP is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers


def read_dims(config: PreTrainedConfig, head: str) -> ModelDims:
    """Return the dimensions of a model with a head.

    Raises:
        BackendError: if megatron's layers would not compute what the Hugging Face model does.
    """
    _check_architecture(config)
    family = config.model_type
    biased = family in ("llama", "qwen3", *EXPERT_FAMILIES) and bool(config.attention_bias)
    return ModelDims(
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        is_tied=head == "lm" and bool(config.tie_word_embeddings),
        has_qkv_bias=family == "qwen2" or biased,
        has_out_bias=biased,
        has_mlp_bias=family == "llama" and bool(config.mlp_bias),
        has_qk_norm=family in ("qwen3", *EXPERT_FAMILIES),
        head=head,
        experts=_read_experts(config) if family in EXPERT_FAMILIES else None,
    )


def _read_experts(config: PreTrainedConfig) -> ExpertDims:
    """Return the experts of a Qwen3 MoE model.

    The layers are those that transformers builds with experts (`Qwen3MoeDecoderLayer`).
    """
    dense, step = set(config.mlp_only_layers or ()), config.decoder_sparse_step
    layers = [i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0]
    return ExpertDims(
        num=config.num_experts,
        per_token=config.num_experts_per_tok,
        intermediate=config.moe_intermediate_size,
        normalizes=bool(config.norm_topk_prob),
        layers=frozenset(layers),
    )


def _check_architecture(config: PreTrainedConfig) -> None:
    family = config.model_type
    if family not in FAMILIES:
        raise BackendError(
            f"model_type {family!r} is not one that the megatron backend builds ({', '.join(FAMILIES)}); "
            "use the torch backend"
        )
    if config.hidden_act != "silu":
        raise BackendError(
            f"hidden_act {config.hidden_act!r} is not silu, which megatron needs; use the torch backend"
        )
    layers = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(config, "sliding_window", None)
    if layers or window is not None:
        what = ", ".join(sorted(layers)) or f"a sliding window of {window}"
        raise BackendError(
            f"{family} uses {what}, but only full causal attention is supported; choose another architecture"
        )
    rope = config.rope_parameters["rope_type"]
    if rope not in _ROPES:
        raise BackendError(f"rope_type {rope!r} is not one of {', '.join(_ROPES)}; use the torch backend")
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise BackendError(
            f"{family} rotates only a part of each head, which is not supported; use the torch backend"
        )


def check_split(dims: ModelDims, tensor: int, pipe: int, expert: int = 1) -> None:
    """Check that a layout splits the model evenly.

    Raises:
        BackendError: if not; suggests the nearest size that works.
    """
    if dims.num_layers < pipe:
        raise BackendError(
            f"{dims.num_layers} layers cannot fill {pipe} pipeline stages; use at most {dims.num_layers}"
        )
    num_experts = 1 if dims.experts is None else dims.experts.num
    if num_experts % expert:
        raise BackendError(
            f"{expert} expert ranks cannot share {num_experts} experts; use {math.gcd(num_experts, expert)}"
        )
    if not _can_split(dims, tensor):
        possible = [n for n in range(1, dims.num_heads + 1) if _can_split(dims, n)]
        nearest = min(possible, key=lambda n: (abs(n - tensor), n))
        raise BackendError(
            f"{tensor} tensor ranks cannot share {dims.num_heads} heads, {dims.num_kv_heads} key-value "
            f"heads and {' or '.join(map(str, _mlp_rows(dims)))} MLP rows; use {nearest}"
        )


def _can_split(dims: ModelDims, tensor: int) -> bool:
    kv = dims.num_kv_heads
    return (
        dims.num_heads % tensor == 0
        and all(rows % tensor == 0 for rows in _mlp_rows(dims))
        and (kv % tensor == 0 or tensor % kv == 0)
    )


def _mlp_rows(dims: ModelDims) -> list[int]:
    """Return the rows of each kind of MLP that the model's layers have."""
    experts = dims.experts
    if experts is None:
        return [dims.intermediate]
    dense = [dims.intermediate] if len(experts.layers) < dims.num_layers else []
    return [*dense, experts.intermediate]
