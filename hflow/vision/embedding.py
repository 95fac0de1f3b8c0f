"""Embeddings of sequences with images: each image of a forward pass goes through the tower once.

Axes: R rows of the forward pass, M rows of images among them, N patches or tiles, C channels, A axes of
positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hflow.data.batches.device_copy import to_device
from hflow.data.batches.shared_prefix import PrefixSharing
from hflow.types.image import Colours, PlacedImage, ProcessedImage
from hflow.vision.interface import Config, ImageFeatures, VisionFamily
from hflow.vision.processor import image_rows

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowsOfImages:
    """The images of a forward pass, and the rows whose embeddings they are."""

    images: tuple[ProcessedImage, ...]
    """Distinct ones."""
    rows: Ints
    """int64 `[M]`, ascending."""
    sources: Ints
    """int64 `[M]`: the token of an image that each row has, counted over `images`."""

    @classmethod
    def of(
        cls, sequences: Iterable[tuple[int, Ints, Sequence[PlacedImage]]], token: int
    ) -> RowsOfImages | None:
        """Find the images of sequences, each its first row, tokens and images; None if there are none.

        `token` is the image token.
        """
        images: dict[str, tuple[int, ProcessedImage]] = {}
        rows, sources, num_tokens = [], [], 0
        for first, ids, placed in sequences:
            for _, image in placed:
                if image.digest not in images:
                    images[image.digest] = (num_tokens, image)
                    num_tokens += image.num_tokens
            rows.append(first + image_rows(ids, placed, token))
            sources += [images[image.digest][0] + np.arange(image.num_tokens) for _, image in placed]
        if not images:
            return None
        all_rows, all_sources = np.concatenate(rows), np.concatenate(sources)
        order = np.argsort(all_rows, kind="stable")
        return cls(tuple(image for _, image in images.values()), all_rows[order], all_sources[order])

    def identities(self, num_rows: int) -> Ints:
        """Return numbers `[num_rows]` by which rows of different images differ."""
        owners = np.repeat([image.identity for image in self.images], [x.num_tokens for x in self.images])
        found = np.zeros(num_rows, np.int64)
        found[self.rows] = owners[self.sources]
        return found

    def computed(self, sharing: PrefixSharing) -> RowsOfImages:
        """Return the images of the computed rows, where tokens of shared prefixes are computed once."""
        rows = sharing.row_of_token[self.rows]
        is_computed = sharing.token_of_row[rows] == self.rows
        return RowsOfImages(self.images, rows[is_computed], self.sources[is_computed])


def encode_images(
    backbone: nn.Module, family: VisionFamily, images: Sequence[ProcessedImage], device: torch.device
) -> ImageFeatures:
    """Run the tower of an HF model without its head on images, normalised on the device in fp32."""
    colours = to_device(torch.from_numpy(np.concatenate([image.pixels for image in images])), device)
    dtype = next(family.encoder.tower(backbone).parameters()).dtype
    pixels = normalised(colours, images[0]).to(dtype)
    return family.encoder.encode(backbone, family.patch_values(pixels), [image.grid for image in images])


def normalised(colours: Tensor, image: ProcessedImage) -> Tensor:
    """Return fp32 colours `[N, C, ...]`, normalised to the bit as transformers does it (`Colours`).

    Each of the 256 values of a channel is looked up.
    """
    factor, mean, deviation = image.colours
    values = (np.arange(256, dtype=np.float64) * factor).astype(np.float32)
    means, deviations = (np.array(x, np.float32)[:, None] for x in (mean, deviation))
    table = to_device(torch.from_numpy((values - means) / deviations), colours.device)
    shape = (1, -1, *[1] * (colours.dim() - 2))
    channels = 256 * torch.arange(len(mean), dtype=torch.int32, device=colours.device).view(shape)
    return table.flatten().index_select(0, (colours.int() + channels).flatten()).view(colours.shape)


def hidden_states(
    backbone: nn.Module,
    family: VisionFamily,
    input_ids: Tensor,
    position_ids: Tensor,
    images: RowsOfImages | None,
    features: ImageFeatures | None,
    **arguments: Any,
) -> Tensor:
    """Run the language model of a model that sees, on ids `[R]` and positions `[A, R]`, int64.

    Return the last layer's output, normalised, `[R, D]`. `features` is what the tower made of the images, and
    `arguments` are others of the language model.
    """
    made: Any = backbone
    embeddings: Tensor = made.get_input_embeddings()(input_ids)
    if images is not None and features is not None:
        rows, sources = (
            to_device(torch.from_numpy(values), input_ids.device) for values in (images.rows, images.sources)
        )
        seen = features.embeddings.index_select(0, sources).to(embeddings.dtype)
        embeddings = embeddings.index_copy(0, rows, seen)
        is_image = torch.zeros(len(embeddings), dtype=torch.bool, device=embeddings.device)
        is_image[rows] = True
        deep = [layer.index_select(0, sources) for layer in features.deep]
        arguments |= family.encoder.deep_arguments(is_image[None], deep)
    elif features is not None:  # of an image that no row has, so that gradients reach the tower
        unused = sum((layer.sum() for layer in features.deep), features.embeddings.sum())
        embeddings = embeddings + (0 * unused).to(embeddings.dtype)
    found: Any = family.encoder.language_model(backbone)(
        inputs_embeds=embeddings[None],
        position_ids=position_ids[:, None] if family.num_axes > 1 else position_ids,
        use_cache=False,
        **arguments,
    )
    hidden: Tensor = found.last_hidden_state[0]
    return hidden


def smallest_image(family: VisionFamily, config: Config) -> ProcessedImage:
    """Return a black image of the fewest tokens, for a rank that must join the tower without images."""
    from PIL import Image as Pillow

    picture = Pillow.new("RGB", (1, 1))
    pixels, grid = family.process(family.processor(config, family.smallest_settings(config)), picture)
    return ProcessedImage(
        "", pixels, grid, family.num_tokens(config, grid), Colours(1.0, (0.0,) * 3, (1.0,) * 3)
    )
