"""The models that megatron can build, and what their layers compute, read from their Hugging Face configs.

The sizes of a model (`ModelShape`) say which parts its layers have. `LayerMath` says what is computed with
them. A family whose parts megatron's layers have is one name in `FAMILIES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hflow.base.errors import BackendError
from hflow.shapes.architectures import KNOWN_FAMILIES, ROUTERS, read_shape
from hflow.shapes.model_shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = KNOWN_FAMILIES
"""`model_type`s that are built."""
_PARTLY_ROTATED = ("glm4", "glm4_moe")
"""Families that may rotate only the first entries of each head."""
_LATENT = ("deepseek_v2", "deepseek_v3")
"""Families with latent attention."""
_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings with one vector of frequencies for all sequence lengths."""
_FULL, _WINDOWED = "full_attention", "sliding_attention"
"""Types of layers in configs."""
_SILU, _GELU = "silu", "gelu_pytorch_tanh"
_REFUSED = {
    "attn_logit_softcapping": "soft caps of scores",
    "final_logit_softcapping": "soft caps of logits",
    "use_bidirectional_attention": "attention to later tokens",
}
"""Keys of configs -> what they ask for, which no layer computes."""


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts and weighs them."""

    score: Literal["softmax", "sigmoid"]
    """What makes scores of logits."""
    normalizes: bool
    """Whether the weights of a token's experts, which are their scores, are divided by their sum."""
    scaling: float = 1.0
    """Factor of the weights."""
    in_fp32: bool = False
    """Whether logits are computed in fp32 in models of any dtype."""
    num_groups: int = 1
    num_kept_groups: int = 1
    """Groups in which a token's experts are chosen. Groups are ranked by the sum of their best experts."""
    best_of_group: int = 1
    """Number of these."""


@dataclass(frozen=True)
class GateClamp:
    """The activation of gpt-oss: `(up + 1) * gate * sigmoid(alpha * gate)`, of clamped gates and ups."""

    alpha: float
    limit: float
    """The largest gate, and the largest absolute value of ups."""


@dataclass(frozen=True)
class LayerMath:
    """What layers compute, beside their sizes."""

    epsilon: float
    """The epsilon of norms."""
    windows: tuple[int | None, ...]
    """The number of last tokens that each layer of the model attends to; None: all."""
    routing: Routing | None
    """None without experts."""
    score_scale: float | None = None
    """Factor of attention's scores; None: the root of the inverse head size."""
    is_interleaved: bool = False
    """Whether neighbouring entries are rotated together, in place of those of the two halves."""
    has_gelu: bool = False
    """Whether gates are activated by GELU, in its approximation by tanh, in place of SiLU."""
    clamp: GateClamp | None = None
    """The activation of experts with biases."""
    has_centred_norms: bool = False
    """Whether 1 is added to the weights of norms."""
    embedding_scale: float = 1.0
    """Factor of embedded tokens."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LayerMath:
        """Read it from a config that `supported_shape` accepts."""
        family = config.model_type
        plain = cls(
            epsilon=config.rms_norm_eps,
            windows=_windows(config),
            routing=_routing(config) if family in ROUTERS else None,
            has_gelu=_activation(config) == _GELU,
        )
        if family in _LATENT:
            is_interleaved = getattr(config, "rope_interleave", True)
            return replace(plain, score_scale=_latent_scale(config), is_interleaved=is_interleaved)
        if family == "glm4":
            return replace(plain, is_interleaved=True)
        if family == "gpt_oss":
            return replace(plain, clamp=GateClamp(config.swiglu_alpha, config.swiglu_limit))
        if family == "gemma3_text":
            return replace(
                plain,
                score_scale=config.query_pre_attn_scalar**-0.5,
                has_centred_norms=True,
                embedding_scale=config.hidden_size**0.5,
            )
        return plain


def ropes_of(config: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Return the rotary embeddings of a config by type of layers, that of windows last; None: all layers."""
    found = config.rope_parameters
    return {None: found} if "rope_type" in found else {kind: found[kind] for kind in (_FULL, _WINDOWED)}


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """Return the window of each layer: that of the config for all, or for those of one type."""
    kinds = getattr(config, "layer_types", None) or [_WINDOWED] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    return tuple(window if kind == _WINDOWED else None for kind in kinds)


def _activation(config: PreTrainedConfig) -> str:
    name: str = getattr(config, "hidden_activation", None) or config.hidden_act
    return name


def _routing(config: PreTrainedConfig) -> Routing:
    kind, is_v2 = ROUTERS[config.model_type], config.model_type == "deepseek_v2"
    has_groups = config.topk_method != "greedy" if is_v2 else getattr(config, "n_group", 1) > 1
    return Routing(
        score=kind.score,
        normalizes=not is_v2 and getattr(config, "norm_topk_prob", True),
        scaling=getattr(config, "routed_scaling_factor", 1.0),
        in_fp32=kind.in_fp32,
        num_groups=config.n_group if has_groups else 1,
        num_kept_groups=config.topk_group if has_groups else 1,
        best_of_group=2 if kind.has_bias else 1,
    )


def _latent_scale(config: PreTrainedConfig) -> float:
    """Return the factor of scores in latent attention, which depends on how positions are stretched."""
    scale: float = config.qk_head_dim**-0.5
    rope = config.rope_parameters
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim"):
        return scale
    stretch: float = 0.1 * rope["mscale_all_dim"] * math.log(max(rope["factor"], 1)) + 1
    return scale * stretch**2


def supported_shape(config: PreTrainedConfig, head: str) -> ModelShape:
    """Return the sizes of a model with a head.

    Raises:
        BackendError: if megatron's layers would not compute what the Hugging Face model does.
    """
    _check_architecture(config)
    shape = read_shape(config.to_dict(), head)
    assert shape is not None, config.model_type
    for key, is_known in (("attention_bias", shape.has_qkv_bias), ("mlp_bias", shape.has_mlp_bias)):
        if getattr(config, key, False) and not is_known:
            raise BackendError(
                f"{shape.family} has {key}, which is not supported; set it to false, or use the torch backend"
            )
    return shape


def _check_architecture(config: PreTrainedConfig) -> None:
    family = config.model_type
    if family not in FAMILIES:
        raise BackendError(
            f"model_type {family!r} is not one that the megatron backend builds "
            f"({', '.join(FAMILIES)}); use the torch backend"
        )
    activations = (_SILU,) if family in ROUTERS else (_SILU, _GELU)
    if (activation := _activation(config)) not in activations:
        raise BackendError(
            f"hidden_act {activation!r} is not {' or '.join(activations)}, which megatron needs; use the "
            "torch backend"
        )
    others = {what for key, what in _REFUSED.items() if getattr(config, key, None)}
    others |= set(getattr(config, "layer_types", None) or ()) - {_FULL, _WINDOWED}
    if others:
        raise BackendError(
            f"{family} uses {', '.join(sorted(others))}, but only causal attention and sliding windows are "
            "supported; choose another architecture"
        )
    for rope in ropes_of(config).values():
        kind = rope["rope_type"]
        if kind not in _ROPES:
            raise BackendError(f"rope_type {kind!r} is not one of {', '.join(_ROPES)}; use the torch backend")
        if rope.get("partial_rotary_factor", 1.0) != 1.0 and family not in _PARTLY_ROTATED:
            raise BackendError(
                f"{family} rotates only a part of each head, which is not supported; use the torch backend"
            )
