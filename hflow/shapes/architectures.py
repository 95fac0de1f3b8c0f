"""The families of models, and how a `ModelShape` is read from a Hugging Face `config.json`.

Every backend can divide the tensors of `FAMILIES`. Of `PLANNED_FAMILIES` parameters, caches and FLOPs are
known, and the tensors one by one if they are among `KNOWN_FAMILIES`: their plans are whole, but some run only
where a backend takes any model of transformers, without dividing tensors. `UNSUPPORTED` run nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from hflow.base.errors import ConfigError, PlanError
from hflow.base.model_files import check_size
from hflow.shapes.model_shape import Experts, LatentAttention, ModelShape, SlidingWindow
from hflow.shapes.vision_shape import LANGUAGE_FAMILIES, read_vision_shape

Config = Mapping[str, Any]

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
    "qwen2_moe": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": None,
        "vocab_size": 151936,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": None,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
"""`model_type`s whose checkpoints have the tensors that `tensors` lists (those of experts one by one), with
transformers' defaults for keys that a config lacks. None: as many key-value heads as heads; D / H for the
head size."""


class ExpertNames(NamedTuple):
    """What checkpoints of a family call an MLP with experts, and the matrices of one of them."""

    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


EXPERT_FAMILIES: Mapping[str, ExpertNames] = {
    "qwen2_moe": ExpertNames(),
    "qwen3_moe": ExpertNames(),
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "glm4_moe": ExpertNames(),
    "deepseek_v2": ExpertNames(),
    "deepseek_v3": ExpertNames(),
}
"""The families whose experts have hflow's names (`models.expert_tensors`). Experts of other families keep the
names that transformers gives them, so that only the torch backend and the embedded engine can exchange
them."""
DENSE_FAMILIES = tuple(name for name in FAMILIES if name not in EXPERT_FAMILIES)
"""The families of `FAMILIES` without experts. They differ in biases, head norms and sizes only."""
LLAMA_LIKE_FAMILIES = (*FAMILIES, "mixtral")
"""The families with Llama's layers: grouped queries, two norms, and a gated MLP or a mixture of such."""
KNOWN_FAMILIES = (*dict.fromkeys((*FAMILIES, "gemma3_text", "glm4", "gpt_oss", *EXPERT_FAMILIES)),)
"""The families whose tensors `tensors` lists under their names in checkpoints, those of experts stacked."""


class RouterKind(NamedTuple):
    """The routers of a family, as transformers has them."""

    module: str
    """Name of the class."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of logits."""
    replays: bool = False
    """Whether they can compute with experts that an engine chose (`models.expert_replay`)."""
    has_bias: bool = False
    """Whether experts are chosen by scores with the bias `SCORE_BIAS`, which has no gradient."""
    in_fp32: bool = False
    """Whether they compute in fp32 in models of any dtype."""
    weighs_in_fp32: bool = False
    """Whether the outputs of experts are multiplied by fp32 although the router does not compute in it."""


ROUTERS: Mapping[str, RouterKind] = {
    "qwen3_moe": RouterKind("Qwen3MoeTopKRouter", replays=True),
    "qwen2_moe": RouterKind("Qwen2MoeTopKRouter", replays=True),
    "mixtral": RouterKind("MixtralTopKRouter", replays=True, weighs_in_fp32=True),
    "olmoe": RouterKind("OlmoeTopKRouter"),
    "gpt_oss": RouterKind("GptOssTopKRouter", replays=True),
    "deepseek_v2": RouterKind("DeepseekV2TopkRouter", in_fp32=True),
    "deepseek_v3": RouterKind("DeepseekV3TopkRouter", "sigmoid", has_bias=True, in_fp32=True),
    "glm4_moe": RouterKind("Glm4MoeTopkRouter", "sigmoid", has_bias=True, in_fp32=True),
}
"""Families whose experts can be balanced (`models.NAME.balance`). None of those that replay has groups of
experts, or scores that are not probabilities."""


def read_shape(config: Config, head: str = "lm") -> ModelShape | None:
    """Return the sizes in an HF `config.json`, or None for a family that the planner does not know.

    Of a model that sees, of a family of `LANGUAGE_FAMILIES`, the shape has the tower. Of other models with
    several parts, the sizes are those of their language model.

    Args:
        config: the mapping with `model_type`; missing keys have the family's defaults.
        head: `lm`, `value` or `score`.

    Raises:
        PlanError: for a size that is not a whole number of at least 1, or a missing one without default.
    """
    family = config.get("model_type")
    if not isinstance(family, str):
        return None
    if family in LANGUAGE_FAMILIES:
        return _vision_shape(family, config, head)
    if family in _WITH_TEXT_CONFIG:
        text = config.get("text_config")
        inner = {"model_type": _WITH_TEXT_CONFIG[family], **text} if isinstance(text, Mapping) else {}
        return read_shape(inner, head)
    if family in ("qwen2_moe", "qwen3_moe"):
        shape = _qwen_moe(family, config)
    elif family in FAMILIES:
        shape = _dense_shape(family, config, FAMILIES[family])
    elif family in PLANNED_FAMILIES:
        shape = PLANNED_FAMILIES[family](family, config)
    else:
        return None
    is_tied = bool(config.get("tie_word_embeddings", family in _TIED_BY_DEFAULT))
    return replace(shape, head=head, is_tied=head == "lm" and is_tied)


def knows_tensors(shape: ModelShape) -> bool:
    """Return whether the tensors of this family are known one by one."""
    return shape.family in KNOWN_FAMILIES


_WITH_TEXT_CONFIG = {"llama4": "llama4_text", "gemma3": "gemma3_text", "mistral3": "mistral"}
"""Families with several parts -> the family of their language model, whose sizes are in `text_config`."""
_TIED_BY_DEFAULT = ("gemma2", "gemma3_text")


def _dense_shape(family: str, config: Config, defaults: Mapping[str, int | None]) -> ModelShape:
    """Return the sizes of a model with grouped-query attention and one MLP in each layer."""
    sizes = _sizes(family, config, defaults)
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
        is_tied=False,
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_out_bias=attention_bias,
        has_mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
    )


_TEXT_DEFAULTS: Mapping[str, Config] = {
    "qwen2_5_vl": {
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "qwen3_vl": {"head_dim": 128},
    "smolvlm": {},
}
"""What transformers' defaults of language models that see differ in from those of their own families."""


def _vision_shape(family: str, config: Config, head: str) -> ModelShape | None:
    """Return the sizes of a model that sees. Older configs have those of its language model outside."""
    found, language_family = config.get("text_config"), LANGUAGE_FAMILIES[family]
    text: Config = found if isinstance(found, Mapping) else config if family == "qwen2_5_vl" else {}
    if family == "smolvlm" and text.get("model_type", language_family) != language_family:
        raise PlanError(
            f"architecture {family!r}: its text_config has model_type {text['model_type']!r}; it must be "
            f"{language_family!r}"
        )
    shape = read_shape({**_TEXT_DEFAULTS[family], **text, "model_type": language_family}, head)
    assert shape is not None, "families of language models are known"
    is_tied = config.get("tie_word_embeddings") or (family == "qwen2_5_vl" and shape.is_tied)
    try:
        vision = read_vision_shape(config, shape.hidden)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    return replace(shape, vision=vision, is_tied=head == "lm" and bool(is_tied))


_NO_DEFAULTS: Mapping[str, int | None] = {
    "hidden_size": 0,
    "intermediate_size": 0,
    "num_hidden_layers": 0,
    "num_attention_heads": 0,
    "num_key_value_heads": None,
    "head_dim": None,
    "vocab_size": 0,
}
"""Families that are only planned state their sizes; a missing one is refused."""


def _mixtral(family: str, config: Config) -> ModelShape:
    shape = _dense_shape(family, config, _NO_DEFAULTS)
    experts = Experts(
        num=_size(family, config, "num_local_experts"),
        per_token=_size(family, config, "num_experts_per_tok"),
        intermediate=shape.intermediate,
    )
    return replace(shape, experts=experts)


def _qwen_moe(family: str, config: Config) -> ModelShape:
    if "num_local_experts" in config:  # as transformers 5 writes it
        config = {"num_experts": config["num_local_experts"], **config}
    defaults = FAMILIES[family]
    shape, sizes = _dense_shape(family, config, defaults), _sizes(family, config, defaults)
    is_qwen2 = family == "qwen2_moe"
    has_bias = bool(config.get("attention_bias", False)) and not is_qwen2
    dense = config.get("mlp_only_layers") or []
    first = len(dense)
    if list(dense) != list(range(first)):
        raise PlanError(f"architecture {family!r}: mlp_only_layers is {dense}; only first layers are known")
    experts = Experts(
        num=sizes["num_experts"],
        per_token=sizes["num_experts_per_tok"],
        intermediate=sizes["moe_intermediate_size"],
        shared=sizes.get("shared_expert_intermediate_size", 0),
        first=first,
        step=_size(family, config, "decoder_sparse_step", 1),
        has_shared_gate=is_qwen2,
    )
    return replace(
        shape,
        experts=experts,
        has_qk_norm=not is_qwen2,
        has_qkv_bias=bool(config.get("qkv_bias", True)) if is_qwen2 else has_bias,
        has_out_bias=has_bias,
    )


def _glm4_moe(family: str, config: Config) -> ModelShape:
    return replace(
        _dense_shape(family, config, _NO_DEFAULTS),
        experts=_deepseek_experts(family, config),
        has_qkv_bias=bool(config.get("attention_bias", False)),
        has_qk_norm=bool(config.get("use_qk_norm", False)),
    )


def _deepseek_v3(family: str, config: Config) -> ModelShape:
    q_rank = config.get("q_lora_rank")
    latent = LatentAttention(
        q_rank=None if q_rank is None else _size(family, config, "q_lora_rank"),
        kv_rank=_size(family, config, "kv_lora_rank"),
        nope=_size(family, config, "qk_nope_head_dim"),
        rope=_size(family, config, "qk_rope_head_dim"),
        value=_size(family, config, "v_head_dim"),
    )
    sizes = {**config, "head_dim": latent.nope + latent.rope, "num_key_value_heads": None}
    shape = _dense_shape(family, sizes, _NO_DEFAULTS)
    has_bias = bool(config.get("attention_bias", False))
    experts = _deepseek_experts(family, config)
    return replace(shape, latent=latent, experts=experts, has_qkv_bias=has_bias, has_out_bias=has_bias)


def _deepseek_experts(family: str, config: Config) -> Experts:
    if config.get("moe_layer_freq", 1) != 1:
        raise PlanError(
            f"architecture {family!r}: moe_layer_freq is {config['moe_layer_freq']}; it must be 1"
        )
    intermediate = _size(family, config, "moe_intermediate_size")
    return Experts(
        num=_size(family, config, "n_routed_experts"),
        per_token=_size(family, config, "num_experts_per_tok"),
        intermediate=intermediate,
        shared=intermediate * int(config.get("n_shared_experts") or 0),
        first=int(config.get("first_k_dense_replace") or 0),
        has_router_bias=True,
    )


def _llama4(family: str, config: Config) -> ModelShape:
    sizes = {**config, "intermediate_size": config.get("intermediate_size_mlp")}
    intermediate = _size(family, config, "intermediate_size")
    experts = Experts(
        num=_size(family, config, "num_local_experts"),
        per_token=_size(family, config, "num_experts_per_tok"),
        intermediate=intermediate,
        shared=intermediate,
        step=_size(family, config, "interleave_moe_layer_step", 1),
    )
    chunk = config.get("attention_chunk_size")
    window = SlidingWindow(chunk, 4) if isinstance(chunk, int) else None
    return replace(_dense_shape(family, sizes, _NO_DEFAULTS), experts=experts, window=window)


def _gpt_oss(family: str, config: Config) -> ModelShape:
    shape = _dense_shape(family, config, _NO_DEFAULTS)
    experts = Experts(
        num=_size(family, config, "num_local_experts"),
        per_token=_size(family, config, "num_experts_per_tok"),
        intermediate=shape.intermediate,
        has_bias=True,
        has_router_bias=True,
    )
    window = SlidingWindow(_size(family, config, "sliding_window"), 2)
    return replace(
        shape, experts=experts, window=window, has_qkv_bias=True, has_out_bias=True, has_sinks=True
    )


def _gemma(family: str, config: Config) -> ModelShape:
    pattern = 2 if family == "gemma2" else _full_every(family, config)
    return replace(
        _dense_shape(family, config, _NO_DEFAULTS),
        window=SlidingWindow(_size(family, config, "sliding_window"), pattern),
        has_post_norms=True,
        has_qk_norm=family == "gemma3_text",
    )


def _full_every(family: str, config: Config) -> int:
    """Return n where every n-th layer of Gemma 3 attends to all tokens: 6, if the config does not say."""
    layers = config.get("layer_types")
    if isinstance(layers, (list, tuple)) and "full_attention" in layers:
        return layers.index("full_attention") + 1
    return _size(family, config, "sliding_window_pattern", 6)


def _glm4(family: str, config: Config) -> ModelShape:
    has_bias = bool(config.get("attention_bias", True))
    return replace(_dense_shape(family, config, _NO_DEFAULTS), has_qkv_bias=has_bias, has_post_norms=True)


def _deepseek_v2(family: str, config: Config) -> ModelShape:
    shape = _deepseek_v3(family, config)
    assert shape.experts is not None
    return replace(shape, experts=replace(shape.experts, has_router_bias=False))


PLANNED_FAMILIES: Mapping[str, Callable[[str, Config], ModelShape]] = {
    "mixtral": _mixtral,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
}
"""Other `model_type`s -> the function that reads their sizes."""
UNSUPPORTED: Mapping[str, str] = {
    "gemma2": "caps scores and logits",
    "llama4_text": "attends in chunks, and scales queries by their position",
    "kimi_k2": "is not in transformers",
    **dict.fromkeys(_WITH_TEXT_CONFIG, "has parts beside its language model"),
}
"""Families that no backend and no engine runs, each with the reason."""
TITLES: Mapping[str, str] = {
    "llama": "Llama 2 and 3, SmolLM2",
    "mistral": "Mistral",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen1.5 and Qwen2 MoE",
    "qwen3_moe": "Qwen3 MoE",
    "gemma3_text": "Gemma 3, text only",
    "glm4": "GLM-4",
    "glm4_moe": "GLM-4.5",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3, R1",
    "gpt_oss": "gpt-oss",
    "mixtral": "Mixtral",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3 with images",
    "llama4": "Llama 4 with images",
    "llama4_text": "Llama 4, text only",
    "mistral3": "Mistral 3 with images",
    "kimi_k2": "Kimi K2",
}
"""Family -> the models that belong to it."""


ONLY_PLANNED = (*PLANNED_FAMILIES, *_WITH_TEXT_CONFIG)
"""These `model_type`s, with those of models that have other parts."""


def _sizes(family: str, config: Config, defaults: Mapping[str, int | None]) -> dict[str, int]:
    """Return the sizes that are known, by their HF names."""
    sizes = {key: config.get(key, default) for key, default in defaults.items()}
    for key, size in sizes.items():
        may_lack = key in ("num_key_value_heads", "head_dim") and size is None
        if not may_lack:
            _check_size(family, key, size)
    return {key: size for key, size in sizes.items() if size is not None}


def _size(family: str, config: Config, key: str, default: int | None = None) -> int:
    """Return one size."""
    size = config.get(key, default)
    _check_size(family, key, size)
    assert isinstance(size, int)
    return size


def _check_size(family: str, key: str, size: Any) -> None:
    try:
        check_size(family, key, size)
    except ConfigError as error:
        raise PlanError(str(error)) from error
