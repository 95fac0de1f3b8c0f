"""Cuts samples of several trajectories into a row for each trajectory, and joins the results.

The sample of an episode that returns a list of trajectories has their tokens one after the other. A model
computes each trajectory by itself, so the batch of a forward pass has a row for each. Rows of a sample have
its id and group, and its values that are not per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.data.batches.batch import Batch, Column
from hflow.types import Unit
from hflow.types.image import PlacedImage
from hflow.types.trajectory import TRAJECTORY


def cut_trajectories(batch: Batch) -> Batch:
    """Return a batch with a row for each trajectory, in the order of samples and tokens.

    The column `trajectory` changes where a trajectory of a sample begins.
    """
    index = np.asarray(batch.columns[TRAJECTORY].values)
    begins = np.ones(len(index), dtype=bool)
    begins[1:] = index[1:] != index[:-1]
    begins[batch.offsets[:-1]] = True
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, len(index)))
    owners = np.searchsorted(batch.offsets, starts, side="right") - 1
    columns = {
        name: column if column.unit is Unit.TOKEN else Column(column.unit, _repeated(column, owners))
        for name, column in batch.columns.items()
    }
    for name, column in columns.items():
        if column.unit is Unit.PIXELS:
            before = (starts - batch.offsets[owners]).tolist()
            spans = zip(column.values, before, lengths.tolist(), strict=True)
            columns[name] = Column(
                column.unit, [_within(images, first, size) for images, first, size in spans]
            )
    return Batch(batch.samples[owners], batch.groups[owners], lengths, columns)


def join_trajectories(rows: Batch, samples: Batch) -> Batch:
    """Return the columns of `cut_trajectories(samples)`, all per token, for the samples."""
    return Batch(samples.samples, samples.groups, samples.lengths, rows.columns)


def _within(images: Sequence[PlacedImage], first: int, size: int) -> tuple[PlacedImage, ...]:
    """Return the images of `size` tokens from `first` on, placed among them."""
    return tuple(
        placed._replace(start=placed.start - first) for placed in images if 0 <= placed.start - first < size
    )


def _repeated(column: Column, owners: npt.NDArray[np.int64]) -> Any:
    if isinstance(column.values, np.ndarray):
        return column.values[owners]
    return [column.values[owner] for owner in owners]
