"""`SequencesWithImages`: reads the images of a batch, and the positions of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hflow.data.batches.batch import Batch
from hflow.types.image import PlacedImage
from hflow.types.trajectory import PIXELS
from hflow.vision.embedding import Ints, RowsOfImages
from hflow.vision.interface import Config, VisionFamily

SEEN = "@seen"
"""The column by which tokens of different images differ."""


class SequencesWithImages:
    """What a model that sees needs of the sequences of a batch, beside their tokens."""

    def __init__(self, family: VisionFamily, config: Config) -> None:
        self.family, self.config = family, config

    def rows_of(self, batch: Batch) -> RowsOfImages | None:
        """Return the images of a batch, and the tokens `[T]` that they have; None if there are none."""
        sequences = zip(batch.offsets.tolist(), *self._sequences(batch), strict=False)
        return RowsOfImages.of(sequences, self.config["image_token_id"])

    def positions(self, batch: Batch) -> Ints:
        """Return the positions `[A, T]` of all tokens."""
        parts = [
            self.family.positions(self.config, *pair) for pair in zip(*self._sequences(batch), strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def _sequences(self, batch: Batch) -> tuple[list[Ints], list[Sequence[PlacedImage]]]:
        """Return the tokens and the images of each sequence. A placeholder has no images."""
        ids: Any = np.split(np.asarray(batch.columns["input_ids"].values), batch.offsets[1:-1])
        column = batch.columns.get(PIXELS)
        return ids, [()] * len(batch) if column is None else list(column.values)
