"""`RowOrder`: which row the n-th prompt of a run is."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


class RowOrder:
    """Rows epoch after epoch, each epoch a permutation of its own.

    A pure function of (seed, position): resuming needs the position only.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True) -> None:
        assert num_rows > 0, "a dataset without rows"
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle

    def row(self, position: int) -> int:
        """The row at `position`, counted from 0 over all epochs."""
        epoch, place = divmod(position, self.num_rows)
        if not self._shuffle:
            return place
        return int(_permutation(self.num_rows, self._seed, epoch)[place])


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.uint32]:
    """Rows of an epoch in order: 40 MB and half a second for ten million rows."""
    rows = np.arange(num_rows, dtype=np.uint32)
    np.random.default_rng((seed, epoch)).shuffle(rows)
    return rows
