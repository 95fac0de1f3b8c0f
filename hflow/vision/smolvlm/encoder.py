"""The tower of SmolVLM, as transformers has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hflow.vision.interface import ImageFeatures


def encode(backbone: Any, pixels: Tensor, grids: Sequence[tuple[int, ...]]) -> ImageFeatures:
    """Run the tower and its projection on all tiles; see `Encoder`."""
    size = backbone.config.vision_config.patch_size
    height, width = (side // size for side in pixels.shape[-2:])
    mask = torch.ones((len(pixels), height, width), dtype=torch.bool, device=pixels.device)
    hidden = backbone.vision_model(pixel_values=pixels, patch_attention_mask=mask).last_hidden_state
    return ImageFeatures(backbone.connector(hidden).flatten(0, 1))


def tower(backbone: Any) -> nn.Module:
    """Return the modules of the tower and its projection."""
    return nn.ModuleList([backbone.vision_model, backbone.connector])


def blocks(backbone: Any) -> Iterable[nn.Module]:
    """Return the blocks of the tower."""
    found: Iterable[nn.Module] = backbone.vision_model.encoder.layers
    return found


def language_model(backbone: Any) -> nn.Module:
    """Return the language model."""
    found: nn.Module = backbone.text_model
    return found


def deep_arguments(rows: Tensor, deep: Sequence[Tensor]) -> dict[str, Any]:
    """Return no arguments: only the first layer sees images."""
    return {}
