"""Tiny models that see, pictures, and batches with images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch_kit
import yaml
from PIL import Image as Pillow
from transformers import AutoConfig

from hflow.data.batches.batch import Batch, Column
from hflow.data.images.files import read_image
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.interface import GenerationResult
from hflow.episodes.trajectories import append_turn, prompt_trajectory
from hflow.models.settings import ModelSettings, RankPosition
from hflow.training.fsdp.backend import TorchModel
from hflow.types import Unit
from hflow.types.trajectory import PIXELS

ROOT = Path(__file__).parents[2]
ALPHABET = "abcdefghijklmnopqrstuvwxyz ?!0123456789<>_\n"
VOCAB = 7 + len(ALPHABET)
_TEXT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_IDS = {"image_token_id": 6, "vision_start_token_id": 4, "vision_end_token_id": 5, "video_token_id": 63}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": 128,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "initializer_range": 0.1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            **_TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 8], "rope_theta": 1e4},
        },
        "vision_config": {**_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        "tie_word_embeddings": True,
        **_IDS,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": {
            **_TEXT,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4},
        },
        "vision_config": {**_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
        **_IDS,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
            "initializer_range": 0.1,
        },
        "scale_factor": 2,
        "image_token_id": 6,
        "tie_word_embeddings": False,
    },
}
PIXELS_OF = {"qwen2_5_vl": (64, 1 << 16), "qwen3_vl": (64, 1 << 16), "smolvlm": (None, 64 * 64)}
"""The fewest and the most pixels of an image. SmolVLM has tiles of 32 x 32, with text between."""


PUBLISHED = {
    "qwen2.5-vl-3b": (3_754_622_976, 668_684_288),
    "qwen2.5-vl-7b": (8_292_166_656, 676_550_144),
    "qwen2.5-vl-72b": (73_410_777_344, 704_573_696),
    "qwen3-vl-2b": (2_127_532_032, 406_957_056),
    "qwen3-vl-4b": (4_437_815_808, 415_347_712),
    "qwen3-vl-8b": (8_767_123_696, 576_388_336),
    "smolvlm2-256m": (256_484_928, 93_510_912),
    "smolvlm2-500m": (507_482_304, 98_229_504),
    "smolvlm2-2.2b": (2_246_784_880, 434_220_912),
}
"""Model -> the parameters of its checkpoint, as the Hub counts them, and those of its tower."""


def config_of(family: str) -> dict[str, Any]:
    """Return the whole HF config of a tiny model."""
    values = {key: value for key, value in ARCHITECTURES[family].items() if key != "model_type"}
    return AutoConfig.for_model(family, **values).to_dict()


def tokenizer(family: str, **changes: Any) -> TextTokenizer:
    settings = TokenizerSettings(
        alphabet=ALPHABET,
        vision=config_of(family),
        min_pixels=PIXELS_OF[family][0],
        max_pixels=PIXELS_OF[family][1],
        **changes,
    )
    return TextTokenizer(settings)


def picture(width: int, height: int, seed: int = 0) -> Pillow.Image:
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Pillow.fromarray(colours)


def settings(family: str, **changes: Any) -> ModelSettings:
    return dataclasses.replace(torch_kit.SETTINGS, architecture=ARCHITECTURES[family], **changes)


def model(family: str, group: Any = None, layout: Any = None, **changes: Any) -> TorchModel:
    position = RankPosition(group, layout) if layout is not None else RankPosition(group)
    return TorchModel(settings(family, **changes), position)


def trajectories(family: str, sizes: list[list[tuple[int, int]]], text: str = "what? ") -> list[Any]:
    """Return trajectories of prompts with pictures of these sizes, and of an answer."""
    made = tokenizer(family)
    return [
        made.join(
            f"{text}{i}", f"answer {i}", [read_image(picture(*size, seed=size[0])) for size in pictures]
        )
        for i, pictures in enumerate(sizes)
    ]


def batch_of(samples: list[Any], groups: list[int] | None = None) -> Batch:
    """Return a batch of trajectories, as a train node reads it."""
    count = len(samples)
    lengths = np.array([len(sample.input_ids) for sample in samples])
    rng = np.random.default_rng(1)
    total = int(lengths.sum())
    mask = np.concatenate([sample.loss_mask for sample in samples])
    columns = {
        "input_ids": Column(Unit.TOKEN, np.concatenate([sample.input_ids for sample in samples])),
        "loss_mask": Column(Unit.TOKEN, mask),
        "behav_logprobs": Column(
            Unit.TOKEN, np.where(mask, rng.normal(-3.6, 0.2, total), 0).astype(np.float32)
        ),
        "versions": Column(Unit.TOKEN, np.where(mask, 3, -1)),
        "advantages": Column(Unit.SEQUENCE, rng.normal(0, 1, count).astype(np.float32)),
        PIXELS: Column(Unit.PIXELS, [sample.pixels for sample in samples]),
    }
    return Batch(np.arange(count), np.array(groups or range(count)), lengths, columns)


def write_recipe(directory: Path, family: str) -> Path:
    """Write a recipe for a tiny model: `tests/integration/recipes/seen_squares.py` with a YAML."""
    architecture = ARCHITECTURES[family]
    text = {**architecture["text_config"], "max_position_embeddings": 1024}
    actor = {
        "architecture": {**architecture, "text_config": text},
        "alphabet": ALPHABET,
        "optim": {"lr": 0.01, "warmup_steps": 0},
    }
    values = {
        "batch": 8,
        "models": {"actor": actor},
        "data": {"train": {"generator": "squares"}},
        "nodes": {"actor_gen": {"max_tokens": 4}},
    }
    recipe = directory / f"{family}.py"
    recipe.write_text((ROOT / "tests/integration/recipes/seen_squares.py").read_text())
    recipe.with_suffix(".yaml").write_text(yaml.safe_dump(values))
    return recipe


def prompt_length(sample: Any) -> int:
    return int(sample.loss_mask.index(True))


def drawn(sample: Any, result: GenerationResult) -> Any:
    """Return the trajectory of a sample's prompt with what an engine drew after it."""
    prompt = sample.input_ids[: prompt_length(sample)]
    return append_turn(prompt_trajectory(prompt, sample.messages[:1], sample.pixels), result, "")


def assert_logprobs(backend: TorchModel, trajectories: list[Any], version: int | None = None) -> None:
    """Check that a trainer gives drawn tokens, those of a version, the log-probs that an engine gave them."""
    (computed,) = backend.infer(torch_kit.call(torch_kit.logprobs, "token", []), [batch_of(trajectories)])
    wanted = np.concatenate([sample.behav_logprobs for sample in trajectories])
    versions = np.concatenate([sample.versions for sample in trajectories])
    mask = versions >= 0 if version is None else versions == version
    assert mask.any()
    assert np.abs(wanted[mask]).max() > 1
    np.testing.assert_allclose(computed.columns["result"].values[mask], wanted[mask], atol=1e-5)
