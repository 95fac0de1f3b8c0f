"""Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923) and Qwen3-VL: patches in their own resolution, M-RoPE.

An image becomes a grid of patches, of which `merge x merge` make one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hflow.base.errors import DataError
from hflow.types.image import PlacedImage
from hflow.vision.interface import Config, Positions, VisionFamily

if TYPE_CHECKING:
    import PIL.Image
    from torch import Tensor


_PIXELS = (56 * 56, 28 * 28 * 1280)
"""The fewest and the most pixels of an image, by default."""


class QwenVision(VisionFamily):
    """What both generations have in common."""

    image_token = "<|image_pad|>"
    special_tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    num_axes = 3
    encoder_module = "hflow.vision.qwen.encoder"
    _frames: ClassVar[int] = 2
    """Frames of a patch: an image is a still video."""

    def processor(self, config: Config, saved: Config) -> Any:
        """Return transformers' image processor; see `VisionFamily`."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        sizes = config["vision_config"]
        own = {
            "patch_size": sizes["patch_size"],
            "temporal_patch_size": sizes["temporal_patch_size"],
            "merge_size": sizes["spatial_merge_size"],
        }
        names = (*Qwen2VLImageProcessorPil.valid_kwargs.__annotations__, "size", "resample", "image_mean")
        known = {key: saved[key] for key in (*names, "image_std", "rescale_factor") if key in saved}
        return Qwen2VLImageProcessorPil(**(own | known))

    def process(
        self, processor: Any, picture: PIL.Image.Image
    ) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
        """Return patches `[N, C, P, P]`, and (1, rows, columns)."""
        try:
            made = processor(images=[picture], do_rescale=False, do_normalize=False)
        except ValueError as error:  # of an image with extreme sides
            raise DataError(f"an image of {picture.width} x {picture.height}: {error}; crop it") from error
        side = processor.patch_size
        frames = np.asarray(made["pixel_values"]).reshape(-1, 3, processor.temporal_patch_size, side, side)
        return frames[:, :, 0].astype(np.uint8), tuple(map(int, made["image_grid_thw"][0]))

    def patch_values(self, pixels: Tensor) -> Tensor:
        """Return patches `[N, C * 2 * P * P]`, each frame repeated."""
        return pixels[:, :, None].expand(-1, -1, self._frames, -1, -1).flatten(1)

    def num_tokens(self, config: Config, grid: tuple[int, ...]) -> int:
        """Return one token for each block of merged patches."""
        frames, rows, columns = grid
        return int(frames * rows * columns) // int(config["vision_config"]["spatial_merge_size"]) ** 2

    def expansion(self, config: Config, grid: tuple[int, ...]) -> str:
        """Return the image token as often as the image has tokens."""
        return self.image_token * self.num_tokens(config, grid)

    def grid_of(self, processor: Any, width: int, height: int) -> tuple[int, ...]:
        """Return (1, rows, columns) of the resized image."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        side, size = processor.patch_size, processor.size
        rows, columns = smart_resize(
            height, width, side * processor.merge_size, size["shortest_edge"], size["longest_edge"]
        )
        return 1, rows // side, columns // side

    def pixel_settings(
        self, config: Config, saved: Config, min_pixels: int | None, max_pixels: int | None
    ) -> Config:
        """Return `size`; see `VisionFamily`."""
        size = dict(saved.get("size") or {"shortest_edge": _PIXELS[0], "longest_edge": _PIXELS[1]})
        for key, own, old in (
            ("shortest_edge", min_pixels, "min_pixels"),
            ("longest_edge", max_pixels, "max_pixels"),
        ):
            size[key] = saved.get(old, size[key]) if own is None else own
        if size["shortest_edge"] > size["longest_edge"]:
            raise DataError(
                f"images have at least {size['shortest_edge']:,} pixels and at most "
                f"{size['longest_edge']:,}; set images.min_pixels and images.max_pixels so that they fit"
            )
        return {"size": size}

    def smallest_settings(self, config: Config) -> Config:
        """Return settings for an image of one token."""
        sizes = config["vision_config"]
        side = (sizes["patch_size"] * sizes["spatial_merge_size"]) ** 2
        return {"size": {"shortest_edge": side, "longest_edge": side}}

    def positions(
        self, config: Config, input_ids: npt.NDArray[np.int64], images: Sequence[PlacedImage]
    ) -> Positions:
        """Return positions by time, row and column `[3, T]`: M-RoPE.

        Tokens of text have the same three. An image begins at the next number p, its token in row i and
        column j has (p, p + i, p + j), and what follows begins at p plus the larger side.
        Source: Wang et al. 2024, "Qwen2-VL", arXiv:2409.12191, section 2.1.
        """
        merge = config["vision_config"]["spatial_merge_size"]
        found = np.empty((3, len(input_ids)), dtype=np.int64)
        start, at = 0, 0
        """The next position, and the next token."""
        for first, image in images:
            found[:, at:first] = start + np.arange(first - at)
            start += first - at
            rows, columns = image.grid[1] // merge, image.grid[2] // merge
            end = first + image.num_tokens
            found[0, first:end] = start
            found[1, first:end] = start + np.repeat(np.arange(rows), columns)
            found[2, first:end] = start + np.tile(np.arange(columns), rows)
            start, at = start + max(rows, columns), end
        found[:, at:] = start + np.arange(len(input_ids) - at)
        return found


class _Qwen25(QwenVision):
    name = "qwen2_5_vl"
    language_family = "qwen2"


class _Qwen3(QwenVision):
    name = "qwen3_vl"
    language_family = "qwen3"


QWEN2_5_VL = _Qwen25()
QWEN3_VL = _Qwen3()
