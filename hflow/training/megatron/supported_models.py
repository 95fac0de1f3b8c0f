"""The models that megatron can build, and what their layers compute, read from their Hugging Face configs.

The sizes of a model (`ModelShape`) say which parts its layers have. `LayerMath` says what is computed with
them. A family whose parts megatron's layers have is one name in `FAMILIES`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from hflow.base.errors import BackendError
from hflow.shapes.architectures import LLAMA_LIKE_FAMILIES, ROUTERS, read_shape
from hflow.shapes.model_shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FAMILIES = (*LLAMA_LIKE_FAMILIES, "glm4_moe", "deepseek_v2", "deepseek_v3")
"""`model_type`s that are built."""
_PARTLY_ROTATED = ("glm4_moe",)
"""Families that may rotate only the first entries of each head."""
_LATENT = ("deepseek_v2", "deepseek_v3")
"""Families with latent attention."""
_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings with one vector of frequencies for all sequence lengths."""


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
class LayerMath:
    """What layers compute, beside their sizes."""

    epsilon: float
    """The epsilon of norms."""
    routing: Routing | None
    """None without experts."""
    score_scale: float | None = None
    """Factor of attention's scores; None: the root of the inverse head size."""
    is_interleaved: bool = False
    """Whether neighbouring entries are rotated together, in place of those of the two halves."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> LayerMath:
        """Read it from a config that `supported_shape` accepts."""
        family = config.model_type
        return cls(
            epsilon=config.rms_norm_eps,
            routing=_routing(config) if family in ROUTERS else None,
            score_scale=_latent_scale(config) if family in _LATENT else None,
            is_interleaved=family in _LATENT and getattr(config, "rope_interleave", True),
        )


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
    return shape


def _check_architecture(config: PreTrainedConfig) -> None:
    family = config.model_type
    if family not in FAMILIES:
        raise BackendError(
            f"model_type {family!r} is not one that the megatron backend builds "
            f"({', '.join(FAMILIES)}); use the torch backend"
        )
    if config.hidden_act != "silu":
        raise BackendError(
            f"hidden_act {config.hidden_act!r} is not silu, which megatron needs; use the torch backend"
        )
    if getattr(config, "mlp_bias", False) and family in _LATENT:
        raise BackendError(f"{family} has biases in its MLP, which is not supported; use the torch backend")
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
    is_partial = config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0
    if is_partial and family not in _PARTLY_ROTATED:
        raise BackendError(
            f"{family} rotates only a part of each head, which is not supported; use the torch backend"
        )
