"""Images of requests as vLLM's engine takes them: the trainer's pixels, at the trainer's places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from vllm.inputs import EngineInput, tokens_input
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)

from hflow.engines.request import GenerationRequest
from hflow.models.dtypes import DTYPES
from hflow.models.hf_config import family_of, read_config
from hflow.models.settings import ModelSettings
from hflow.types.image import PlacedImage, ProcessedImage
from hflow.vision.embedding import normalised
from hflow.vision.processor import image_rows

IMAGE = "image"
"""vLLM's name of what is not text."""


class ImageInputs:
    """Makes vLLM's inputs of requests with images."""

    def __init__(self, settings: ModelSettings) -> None:
        config = read_config(settings)
        self._config, self._family = config.to_dict(), family_of(config)
        self._dtype = DTYPES[settings.dtype]
        self._images: dict[str, ProcessedImage] = {}
        self._items: WeakValueDictionary[str, MultiModalKwargsItem] = WeakValueDictionary()
        """Digest -> what vLLM gets of an image, while a request has it."""

    def keep(self, new: Sequence[ProcessedImage], forgotten: Sequence[str]) -> None:
        """Keep images for later requests, and forget others."""
        for digest in forgotten:
            del self._images[digest]
        self._images |= {image.digest: image for image in new}

    def of(self, request: GenerationRequest) -> EngineInput:
        """Return the input of a request, whose images are kept."""
        ids = list(request.ids)  # a copy, as the request appends what it draws
        if not request.images:
            return tokens_input(ids)
        digests = [image.digest for _, image in request.images]
        return mm_input(
            ids,
            MultiModalKwargsItems({IMAGE: [self._item(digest) for digest in digests]}),
            {IMAGE: digests},
            {IMAGE: [self._place(ids, placed) for placed in request.images]},
        )

    def _place(self, ids: Sequence[int], placed: PlacedImage) -> PlaceholderRange:
        """Return the place of an image's tokens, with a mask if others are between them."""
        rows = image_rows(np.asarray(ids), [placed], self._config["image_token_id"])
        offset, length = int(rows[0]), int(rows[-1] - rows[0]) + 1
        mask = torch.zeros(length, dtype=torch.bool)
        mask[torch.from_numpy(rows - offset)] = True
        return PlaceholderRange(offset, length, None if length == len(rows) else mask)

    def _item(self, digest: str) -> MultiModalKwargsItem:
        if digest not in self._items:
            assert self._family is not None, "only models that see have images"
            image = self._images[digest]
            colours = normalised(torch.from_numpy(image.pixels), image).to(self._dtype)
            pixels = self._family.patch_values(colours).contiguous()
            item = _tiles(pixels) if self._family.name == "smolvlm" else _patches(pixels, image.grid)
            self._items[digest] = item  # until the last request that has it ends
            return item
        return self._items[digest]


def _patches(pixels: Tensor, grid: Sequence[int]) -> MultiModalKwargsItem:
    """Return an image of Qwen2.5-VL or Qwen3-VL."""
    return _made({"pixel_values": pixels}, {"image_grid_thw": torch.tensor([grid])})


def _tiles(pixels: Tensor) -> MultiModalKwargsItem:
    """Return an image of SmolVLM, whose tiles are full."""
    mask = torch.ones((len(pixels), *pixels.shape[-2:]), dtype=torch.bool)
    return _made(
        {"pixel_values": pixels, "pixel_attention_mask": mask}, {"num_patches": torch.tensor([len(pixels)])}
    )


def _made(parts: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> MultiModalKwargsItem:
    """Return the arguments of an image: values of its N parts, `[N, ...]`, and of the whole, `[1, ...]`.

    The parts are its patches or tiles. The tower reads the values of the whole on the host.
    """
    values: Any = {**parts, **whole}
    fields = {
        key: MultiModalFieldConfig.flat(IMAGE, [slice(0, len(value))]) for key, value in parts.items()
    } | {key: MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True) for key in whole}
    (item,) = MultiModalKwargsItems.from_hf_inputs(values, fields)[IMAGE]
    return item
