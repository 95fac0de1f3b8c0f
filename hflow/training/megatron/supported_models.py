"""The models that megatron can build, read from their Hugging Face configs."""

from __future__ import annotations

from transformers import PreTrainedConfig

from hflow.base.errors import BackendError
from hflow.shapes.architectures import LLAMA_LIKE_FAMILIES, read_shape
from hflow.shapes.model_shape import ModelShape

_ROPES = ("default", "linear", "llama3")
"""Rotary embeddings with one vector of frequencies for all sequence lengths."""


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
    if family not in LLAMA_LIKE_FAMILIES:
        raise BackendError(
            f"model_type {family!r} is not one that the megatron backend builds "
            f"({', '.join(LLAMA_LIKE_FAMILIES)}); use the torch backend"
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
