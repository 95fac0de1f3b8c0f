"""`RowOrder`: the dataset row of each prompt of a run."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


class RowOrder:
    """Rows epoch after epoch, each epoch in a new random order.

    It is a pure function of (seed, position), so resuming needs only the position.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool = True) -> None:
        assert num_rows > 0, "the dataset has no rows"
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle

    def row(self, position: int) -> int:
        """Return the row at `position`, counted from 0 over all epochs."""
        epoch, index = divmod(position, self.num_rows)
        if not self._shuffle:
            return index
        return int(_permutation(self.num_rows, self._seed, epoch)[index])


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.uint32]:
    """Return the rows of an epoch in order: 40 MB and half a second for ten million rows."""
    rows = np.arange(num_rows, dtype=np.uint32)
    np.random.default_rng((seed, epoch)).shuffle(rows)
    return rows
