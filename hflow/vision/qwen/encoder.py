"""The towers of Qwen2.5-VL and Qwen3-VL, as transformers has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hflow.vision.interface import ImageFeatures


def encode(backbone: Any, pixels: Tensor, grids: Sequence[tuple[int, ...]]) -> ImageFeatures:
    """Run the tower; see `Encoder`."""
    made = tower(backbone)(pixels, grid_thw=torch.tensor(grids, device=pixels.device), return_dict=True)
    return ImageFeatures(made.pooler_output, tuple(getattr(made, "deepstack_features", None) or ()))


def tower(backbone: Any) -> nn.Module:
    """Return the tower, with its projections."""
    found: nn.Module = backbone.visual
    return found


def blocks(backbone: Any) -> Iterable[nn.Module]:
    """Return the blocks of the tower."""
    found: Iterable[nn.Module] = backbone.visual.blocks
    return found


def language_model(backbone: Any) -> nn.Module:
    """Return the language model."""
    found: nn.Module = backbone.language_model
    return found


def deep_arguments(rows: Tensor, deep: Sequence[Tensor]) -> dict[str, Any]:
    """Return the arguments of DeepStack (Meng et al. 2024, arXiv:2406.04334), which only Qwen3-VL has."""
    return {"visual_pos_masks": rows, "deepstack_visual_embeds": list(deep)} if deep else {}
