"""SmolVLM (Marafioti et al. 2025, arXiv:2504.05299): an image is split into tiles of one size.

A larger image becomes rows and columns of tiles, and the whole of it made small. Each tile has the same
number of tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hflow.base.errors import DataError
from hflow.vision.interface import Config, VisionFamily

if TYPE_CHECKING:
    import PIL.Image
    from torch import Tensor

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"


class SmolVision(VisionFamily):
    """SmolVLM, whose language model is a Llama."""

    name = "smolvlm"
    language_family = "llama"
    image_token = "<image>"
    special_tokens = (_AROUND, _WHOLE, "<image>")
    placeholder = "<image>"
    encoder_module = "hflow.vision.smolvlm.encoder"

    def processor(self, config: Config, saved: Config) -> Any:
        """Return transformers' image processor; see `VisionFamily`."""
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        side = config["vision_config"]["image_size"]
        own = {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": 4 * side}}
        keys = (
            "size",
            "max_image_size",
            "do_image_splitting",
            "resample",
            "image_mean",
            "image_std",
            "rescale_factor",
        )
        return SmolVLMImageProcessorPil(**(own | {key: saved[key] for key in keys if key in saved}))

    def process(
        self, processor: Any, picture: PIL.Image.Image
    ) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
        """Return tiles `[N, C, S, S]`, and (rows, columns), which are 0 of an image that is not split."""
        made = processor(images=[[picture]], do_rescale=False, do_normalize=False, return_row_col_info=True)
        tiles = np.asarray(made["pixel_values"])[0].astype(np.uint8)
        return tiles, (int(made["rows"][0][0]), int(made["cols"][0][0]))

    def patch_values(self, pixels: Tensor) -> Tensor:
        """Return the tiles `[N, C, S, S]`."""
        return pixels

    def num_tokens(self, config: Config, grid: tuple[int, ...]) -> int:
        """Return the tokens of all tiles."""
        rows, columns = grid
        return (rows * columns + 1) * self._tile_tokens(config)

    def expansion(self, config: Config, grid: tuple[int, ...]) -> str:
        """Return the text of an image: each tile after its place, and the whole."""
        tile = self.image_token * self._tile_tokens(config)
        rows, columns = grid
        lines = (
            "".join(f"{_AROUND}<row_{i + 1}_col_{j + 1}>{tile}" for j in range(columns)) + "\n"
            for i in range(rows)
        )
        return "".join(lines) + "\n" * bool(rows) + f"{_AROUND}{_WHOLE}{tile}{_AROUND}"

    def grid_of(self, processor: Any, width: int, height: int) -> tuple[int, ...]:
        """Return (rows, columns) of the tiles."""
        _, rows, columns = processor.get_number_of_image_patches(height, width, {})
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def pixel_settings(
        self, config: Config, saved: Config, min_pixels: int | None, max_pixels: int | None
    ) -> Config:
        """Return the longest side of an image, a whole number of tiles; see `VisionFamily`."""
        if min_pixels is not None:
            raise DataError("SmolVLM has no images.min_pixels: its tiles have one size; remove it")
        if max_pixels is None:
            return {}
        side = (saved.get("max_image_size") or {}).get("longest_edge", config["vision_config"]["image_size"])
        return {"size": {"longest_edge": max(1, math.isqrt(max_pixels) // side) * side}}

    def smallest_settings(self, config: Config) -> Config:
        """Return settings for an image of one tile."""
        return {"do_image_splitting": False}

    def _tile_tokens(self, config: Config) -> int:
        sizes = config["vision_config"]
        patches: int = (sizes["image_size"] // sizes["patch_size"]) ** 2
        return patches // int(config["scale_factor"]) ** 2


SMOLVLM = SmolVision()
