"""`StepImages`: the forward pass of a model that sees, in which each image goes through the tower once.

Features are kept while a request has the image and the weights stay, so that the samples of a group, and the
turns of an episode, share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hflow.data.batches.device_copy import to_device
from hflow.engines.embedded.packing import PackedForward, PromptGroup
from hflow.engines.request import GenerationRequest
from hflow.types.image import ProcessedImage
from hflow.vision.embedding import Ints, RowsOfImages, encode_images, hidden_states
from hflow.vision.interface import ImageFeatures, VisionFamily


class StepImages:
    """Runs the steps of a model that sees, an HF model with its output layer."""

    def __init__(self, module: nn.Module, family: VisionFamily) -> None:
        self._module: Any = module
        config: Any = module.config
        self._family = family
        self._config = config.to_dict()
        self._features: dict[str, ImageFeatures] = {}
        self._shifts: dict[int, int] = {}
        """Request -> the position of its next token minus the number of its tokens."""

    def logits(
        self, packed: PackedForward, decoding: Sequence[GenerationRequest], groups: Sequence[PromptGroup]
    ) -> Tensor:
        """Return the logits `[len(logit_rows), V]` of a step.

        It has the last tokens of the sequences `decoding` first; the prompts of the groups follow.
        """
        rows = RowsOfImages.of(self._sequences(len(decoding), groups), self._config["image_token_id"])
        hidden = hidden_states(
            self._module.base_model,
            self._family,
            packed.input_ids,
            self._positions(packed, decoding, groups),
            rows,
            None if rows is None else self._features_of(rows.images, packed.input_ids.device),
            packed_step=packed.step,
        )
        logits: Tensor = self._module.get_output_embeddings()(hidden.index_select(0, packed.logit_rows))
        return logits

    def keep(self, requests: Iterable[GenerationRequest]) -> None:
        """Forget the features of images that none of these requests has."""
        requests = list(requests)
        images = {image.digest for request in requests for _, image in request.images}
        self._features = {digest: x for digest, x in self._features.items() if digest in images}
        numbers = {request.request_id for request in requests}
        self._shifts = {number: shift for number, shift in self._shifts.items() if number in numbers}

    def _sequences(self, first: int, groups: Sequence[PromptGroup]) -> Iterable[tuple[int, Ints, Any]]:
        for group in groups:
            yield first, np.array(group.ids, np.int64), group.images
            first += len(group.ids)

    def _positions(
        self, packed: PackedForward, decoding: Sequence[GenerationRequest], groups: Sequence[PromptGroup]
    ) -> Tensor:
        """Return the positions `[A, rows]`, which images move."""
        num_axes = self._family.num_axes
        if num_axes == 1:
            return packed.positions[None]
        parts = [
            np.array([[len(r.ids) - 1 + self._shifts.get(r.request_id, 0) for r in decoding]] * num_axes)
        ]
        for group in groups:
            positions = self._family.positions(self._config, np.array(group.ids, np.int64), group.images)
            shift = int(positions.max()) + 1 - len(group.ids)  # host: numpy
            self._shifts |= {member.request_id: shift for member in group.members}
            parts.append(positions)
        found = np.concatenate([part.reshape(num_axes, -1) for part in parts], axis=1).astype(np.int64)
        missing = len(packed.input_ids) - found.shape[1]
        filled = np.pad(found, ((0, 0), (0, missing)))
        return to_device(torch.from_numpy(filled), packed.positions.device)

    def _features_of(self, images: Sequence[ProcessedImage], device: torch.device) -> ImageFeatures:
        """Return the features of images, one after the other; those that are new are computed together."""
        new = [image for image in images if image.digest not in self._features]
        if new:
            made = encode_images(self._module.base_model, self._family, new, device)
            sizes = [image.num_tokens for image in new]
            layers = [torch.split(layer, sizes) for layer in (made.embeddings, *made.deep)]
            for image, first, *deep in zip(new, *layers, strict=True):
                self._features[image.digest] = ImageFeatures(first, tuple(deep))
        found = [self._features[image.digest] for image in images]
        deep_layers = zip(*(x.deep for x in found), strict=True)
        return ImageFeatures(
            torch.cat([x.embeddings for x in found]), tuple(torch.cat(layer) for layer in deep_layers)
        )
