"""`VisionShape`: the sizes of a vision tower, and its tensors.

An image is cut into patches, which pass blocks of full attention, or attention within windows.
`merge x merge` patches become one token of the language model. Names are those of transformers' modules.

Axes: C channels, P patch side, D hidden, F intermediate, M = merge^2 D, O the language model's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from hflow.base.model_files import check_size

Named = tuple[str, tuple[int, ...]]
"""The name and the shape of a tensor."""
CHANNELS = 3


@dataclass(frozen=True)
class VisionShape:
    """Sizes of one tower with its projection to the language model."""

    family: str
    """`model_type` of the HF config, such as `qwen3_vl`."""
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    output: int
    """Size of the language model's hidden states."""
    patch: int
    merge: int
    """Patches on each side of the square that becomes a token."""
    num_positions: int = 0
    """Rows of the learned table of positions; 0: there is none."""
    frames: int = 1
    """Frames of a patch, as an image is a still video."""
    window: int = 0
    """Patches on each side of an attention's window; 0: all blocks attend to all patches."""
    full_layers: tuple[int, ...] = ()
    """The blocks that attend to all patches of an image, where others have windows."""
    num_deep: int = 0
    """Blocks whose outputs the first layers of the language model receive too (DeepStack)."""
    is_frozen: bool = False
    """Whether its tensors are left out of those of the model, as training does not change them."""

    @property
    def has_gate(self) -> bool:
        """Whether the MLP of a block has three matrices."""
        return self.family == "qwen2_5_vl"

    @property
    def num_mlp(self) -> int:
        """Number of matrices of a block's MLP."""
        return 3 if self.has_gate else 2

    @property
    def block_matrices(self) -> int:
        """Elements of the matrices of a block."""
        return 4 * self.hidden**2 + self.num_mlp * self.hidden * self.intermediate

    @property
    def merged(self) -> int:
        """Elements of a token's patches."""
        return self.merge**2 * self.hidden

    @property
    def projection_matrices(self) -> int:
        """Elements of the matrices that make one token."""
        if self.family == "smolvlm":
            return self.merged * self.output
        return (1 + self.num_deep) * self.merged * (self.merged + self.output)

    @property
    def patch_matrix(self) -> int:
        """Elements of the matrix that embeds a patch."""
        return CHANNELS * self.frames * self.patch**2 * self.hidden


@dataclass(frozen=True)
class ImageLoad:
    """An image as the processor of a model makes it: its tokens, and what the tower computes for it."""

    tokens: int
    """Tokens of a prompt that get their embeddings from the image."""
    patches: int
    """Patches that pass the tower."""
    full_pairs: int
    """Pairs of patches that see each other in a block without windows."""
    windowed_pairs: int
    """The same in a block with windows."""
    num_bytes: int
    """Bytes of its colours, one for each."""


PREFIXES = {"qwen2_5_vl": "language_model", "qwen3_vl": "language_model", "smolvlm": "text_model"}
"""`model_type` -> the name of the language model in the modules of a model that sees."""
LANGUAGE_FAMILIES = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "smolvlm": "llama"}
"""`model_type` of a model that sees -> that of its language model."""

_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "qwen2_5_vl": {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 3584,
        "window_size": 112,
    },
    "qwen3_vl": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
    },
    "smolvlm": {
        "num_hidden_layers": 12,
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "patch_size": 32,
        "image_size": 224,
    },
}
"""transformers' defaults for keys that a `vision_config` lacks."""
_FULL, _DEEP = (7, 15, 23, 31), (8, 16, 24)


def whole_vision_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the HF config of a model that sees with transformers' defaults of its tower."""
    found = config.get("vision_config")
    given: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    sizes = {**_DEFAULTS[config["model_type"]], **given}
    return {"scale_factor": 2, **config, "vision_config": sizes}


def read_vision_shape(config: Mapping[str, Any], output: int) -> VisionShape:
    """Return the sizes of the tower in the HF config of a family of `PREFIXES`.

    `output` is the hidden size of its language model.

    Raises:
        ConfigError: for a size that is not a whole number of at least 1.
    """
    family, whole = config["model_type"], whole_vision_config(config)
    sizes = whole["vision_config"]
    for key in _DEFAULTS[family]:
        check_size(family, f"vision_config.{key}", sizes[key])
    if family == "smolvlm":
        check_size(family, "scale_factor", whole["scale_factor"])
        return VisionShape(
            family,
            sizes["num_hidden_layers"],
            sizes["hidden_size"],
            sizes["intermediate_size"],
            sizes["num_attention_heads"],
            output,
            sizes["patch_size"],
            whole["scale_factor"],
            num_positions=(sizes["image_size"] // sizes["patch_size"]) ** 2,
        )
    has_windows = family == "qwen2_5_vl"
    return VisionShape(
        family,
        sizes["depth"],
        sizes["hidden_size"],
        sizes["intermediate_size"],
        sizes["num_heads"],
        sizes["out_hidden_size"],
        sizes["patch_size"],
        sizes["spatial_merge_size"],
        num_positions=sizes.get("num_position_embeddings", 0),
        frames=sizes["temporal_patch_size"],
        window=sizes["window_size"] // sizes["patch_size"] if has_windows else 0,
        full_layers=tuple(sizes.get("fullatt_block_indexes", _FULL)) if has_windows else (),
        num_deep=0 if has_windows else len(sizes.get("deepstack_visual_indexes", _DEEP)),
    )


@lru_cache
def tower_block(tower: VisionShape, index: int | str = 0) -> tuple[Named, ...]:
    """Return the tensors of one block."""
    return tuple(_smol_block(tower, index) if tower.family == "smolvlm" else _qwen_block(tower, index))


@lru_cache
def tower_tensors(tower: VisionShape) -> tuple[Named, ...]:
    """Return all tensors of a tower, in transformers' order."""
    blocks = [named for index in range(tower.num_layers) for named in tower_block(tower, index)]
    first, last = _smol_ends(tower) if tower.family == "smolvlm" else _qwen_ends(tower)
    return (*first, *blocks, *last)


def num_tower_parameters(tower: VisionShape) -> int:
    """Return the number of parameters of a tower with its projection."""
    return sum(_numel(shape) for _, shape in tower_tensors(tower))


def _numel(shape: Iterable[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _qwen_block(tower: VisionShape, index: int | str) -> Iterator[Named]:
    at, d, f = f"model.visual.blocks.{index}.", tower.hidden, tower.intermediate
    for name in ("norm1", "norm2"):
        yield from _norm(at + name, d, has_bias=not tower.has_gate)
    yield from _linear(at + "attn.qkv", 3 * d, d)
    yield from _linear(at + "attn.proj", d, d)
    if tower.has_gate:
        for name in ("gate", "up"):
            yield from _linear(f"{at}mlp.{name}_proj", f, d)
        yield from _linear(at + "mlp.down_proj", d, f)
    else:
        yield from _linear(at + "mlp.linear_fc1", f, d)
        yield from _linear(at + "mlp.linear_fc2", d, f)


def _qwen_ends(tower: VisionShape) -> tuple[list[Named], list[Named]]:
    """Return the tensors before and after the blocks."""
    at, d, m = "model.visual.", tower.hidden, tower.merged
    patches: Named = (at + "patch_embed.proj.weight", (d, CHANNELS, tower.frames, tower.patch, tower.patch))
    first = [patches]
    if tower.has_gate:
        merger = at + "merger."
        last = [*_norm(merger + "ln_q", d), *_linear(merger + "mlp.0", m, m)]
        return first, [*last, *_linear(merger + "mlp.2", tower.output, m)]
    first += [(at + "patch_embed.proj.bias", (d,)), (at + "pos_embed.weight", (tower.num_positions, d))]
    mergers = [("merger.", d), *((f"deepstack_merger_list.{i}.", m) for i in range(tower.num_deep))]
    return first, [
        named
        for name, size in mergers
        for named in (
            *_norm(f"{at}{name}norm", size, has_bias=True),
            *_linear(f"{at}{name}linear_fc1", m, m),
            *_linear(f"{at}{name}linear_fc2", tower.output, m),
        )
    ]


def _smol_block(tower: VisionShape, index: int | str) -> Iterator[Named]:
    at, d, f = f"model.vision_model.encoder.layers.{index}.", tower.hidden, tower.intermediate
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        yield from _linear(f"{at}self_attn.{name}", d, d)
    yield from _norm(at + "layer_norm1", d, has_bias=True)
    yield from _linear(at + "mlp.fc1", f, d)
    yield from _linear(at + "mlp.fc2", d, f)
    yield from _norm(at + "layer_norm2", d, has_bias=True)


def _smol_ends(tower: VisionShape) -> tuple[list[Named], list[Named]]:
    """Return the tensors before and after the blocks."""
    at, d = "model.vision_model.", tower.hidden
    first = [
        (at + "embeddings.patch_embedding.weight", (d, CHANNELS, tower.patch, tower.patch)),
        (at + "embeddings.patch_embedding.bias", (d,)),
        (at + "embeddings.position_embedding.weight", (tower.num_positions, d)),
    ]
    projection = ("model.connector.modality_projection.proj.weight", (tower.output, tower.merged))
    return first, [*_norm(at + "post_layernorm", d, has_bias=True), projection]


def _linear(name: str, rows: int, columns: int) -> Iterator[Named]:
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def _norm(name: str, size: int, *, has_bias: bool = False) -> Iterator[Named]:
    yield f"{name}.weight", (size,)
    if has_bias:
        yield f"{name}.bias", (size,)
