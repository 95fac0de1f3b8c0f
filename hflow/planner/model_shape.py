"""`ModelShape`: the sizes of a decoder-only transformer, and the list of its tensors.

Names and shapes are those of Hugging Face checkpoints (Llama, Mistral, Qwen2 and Qwen3 families). Plans refer
to checkpoint tensors only, even if a backend fuses or pads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hflow.errors import PlanError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one model with its head.

    Axes: D hidden, V vocabulary, F intermediate, H heads, K key-value heads, E head size.
    """

    family: str
    """`model_type` of the HF config: `llama`, `mistral`, `qwen2`, `qwen3`."""
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    """Whether the output matrix is the embedding."""
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    """Whether the attention's output projection has a bias (Llama's `attention_bias`)."""
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    head: str = "lm"
    """`lm`: an output matrix `[V, D]`; `value` and `score`: a vector `[1, D]` in its place."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a checkpoint, and how tensor parallelism may split it."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    """Index of its decoder layer; None for embedding, final norm and head."""
    location: str
    """`layer`, `embedding` (first stage), `norm` or `head` (last stage). A tied output matrix is the
    embedding tensor, which both the first and the last stage hold."""
    split_axis: int | None = None
    """The axis that tensor parallelism splits; None: every tensor rank holds the whole tensor."""
    split_units: int = 1
    """Number of equal units of the split axis that must stay whole: heads for q and o, key-value heads for k
    and v, rows for the MLP, tokens for a vocabulary."""
    may_repeat: bool = False
    """Whether several tensor ranks may hold the same unit if there are fewer units than ranks (key-value
    heads)."""
    may_pad: bool = False
    """Whether a backend may pad the axis to a multiple of its ranks (vocabulary)."""

    @property
    def numel(self) -> int:
        """Number of entries."""
        count = 1
        for size in self.shape:
            count *= size
        return count


_LLAMA: Mapping[str, int | None] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 32000,
}
_QWEN2 = {**_LLAMA, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936}

FAMILIES: Mapping[str, Mapping[str, int | None]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
}
"""`model_type`s whose checkpoints have the tensors that `tensors` lists, with transformers' defaults for keys
that a config lacks. None: as many key-value heads as heads; D / H for the head size."""

DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2}
"""Bytes of one entry by dtype."""


def read_shape(config: Mapping[str, Any], head: str = "lm") -> ModelShape | None:
    """Return the sizes in an HF `config.json`, or None for a family that the planner does not know.

    Args:
        config: the mapping with `model_type`; missing keys have the family's defaults.
        head: `lm`, `value` or `score`.

    Raises:
        PlanError: for a size that is not a whole number of at least 1.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        return None
    sizes = _sizes(family, config)
    num_heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    attention_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias", False))
    return ModelShape(
        family=family,
        num_layers=sizes["num_hidden_layers"],
        hidden=hidden,
        intermediate=sizes["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=sizes.get("num_key_value_heads", num_heads),
        head_dim=sizes.get("head_dim", hidden // num_heads),
        vocab=sizes["vocab_size"],
        is_tied=head == "lm" and bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_out_bias=attention_bias,
        has_mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        head=head,
    )


@lru_cache
def tensors(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return every tensor of the model's checkpoint, in the order in which transformers lists them."""
    return (
        TensorSpec(
            "model.embed_tokens.weight",
            (shape.vocab, shape.hidden),
            None,
            "embedding",
            0,
            shape.vocab,
            may_pad=True,
        ),
        *(spec for layer in range(shape.num_layers) for spec in layer_tensors(shape, layer)),
        TensorSpec("model.norm.weight", (shape.hidden,), None, "norm"),
        *_head(shape),
    )


def layer_tensors(shape: ModelShape, layer: int) -> tuple[TensorSpec, ...]:
    """Return the tensors of one decoder layer."""
    return tuple(_layer(shape, str(layer), layer))


@lru_cache
def layer_template(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return the tensors of any layer, with `{}` for the layer index in their names."""
    return tuple(_layer(shape, "{}", 0))


@lru_cache
def other_tensors(shape: ModelShape) -> tuple[TensorSpec, ...]:
    """Return the tensors outside the decoder layers: embedding, final norm, head."""
    return tensors(replace(shape, num_layers=0))


def num_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of the whole model."""
    in_layer = sum(spec.numel for spec in layer_template(shape))
    return shape.num_layers * in_layer + sum(spec.numel for spec in other_tensors(shape))


def _sizes(family: str, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that are known, by their HF names."""
    sizes = {key: config.get(key, default) for key, default in FAMILIES[family].items()}
    for key, size in sizes.items():
        may_lack = key in ("num_key_value_heads", "head_dim") and size is None
        if not may_lack and (not isinstance(size, int) or size < 1):
            raise PlanError(
                f"architecture {family!r}: {key} is {size!r}; it must be a whole number of at least 1"
            )
    return {key: size for key, size in sizes.items() if size is not None}


def _layer(shape: ModelShape, index: str, layer: int) -> Iterator[TensorSpec]:
    prefix = f"model.layers.{index}."
    d, e = shape.hidden, shape.head_dim
    heads, kv = shape.num_heads, shape.num_kv_heads
    for name, units, may_repeat in (("q", heads, False), ("k", kv, True), ("v", kv, True)):
        at = f"{prefix}self_attn.{name}_proj."
        yield TensorSpec(at + "weight", (units * e, d), layer, "layer", 0, units, may_repeat)
        if shape.has_qkv_bias:
            yield TensorSpec(at + "bias", (units * e,), layer, "layer", 0, units, may_repeat)
    yield TensorSpec(f"{prefix}self_attn.o_proj.weight", (d, heads * e), layer, "layer", 1, heads)
    if shape.has_out_bias:
        yield TensorSpec(f"{prefix}self_attn.o_proj.bias", (d,), layer, "layer")
    if shape.has_qk_norm:
        yield TensorSpec(f"{prefix}self_attn.q_norm.weight", (e,), layer, "layer")
        yield TensorSpec(f"{prefix}self_attn.k_norm.weight", (e,), layer, "layer")
    f = shape.intermediate
    for name in ("gate", "up"):
        yield TensorSpec(f"{prefix}mlp.{name}_proj.weight", (f, d), layer, "layer", 0, f)
        if shape.has_mlp_bias:
            yield TensorSpec(f"{prefix}mlp.{name}_proj.bias", (f,), layer, "layer", 0, f)
    yield TensorSpec(f"{prefix}mlp.down_proj.weight", (d, f), layer, "layer", 1, f)
    if shape.has_mlp_bias:
        yield TensorSpec(f"{prefix}mlp.down_proj.bias", (d,), layer, "layer")
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield TensorSpec(f"{prefix}{name}.weight", (d,), layer, "layer")


def _head(shape: ModelShape) -> Iterator[TensorSpec]:
    if shape.head != "lm":
        yield TensorSpec(f"{shape.head}_head.weight", (1, shape.hidden), None, "head")
        yield TensorSpec(f"{shape.head}_head.bias", (1,), None, "head")
    elif not shape.is_tied:
        yield TensorSpec(
            "lm_head.weight", (shape.vocab, shape.hidden), None, "head", 0, shape.vocab, may_pad=True
        )
