"""Two-digit additions: a task whose answers are known and which a tiny model can learn."""

from __future__ import annotations

from typing import Any

import numpy as np

from hflow.data.columns import Columns, check_names, checked
from hflow.errors import DataError

NUM_PAIRS = 10_000
NUM_HELDOUT = 500
_SEED = 0


class Addition:
    """All pairs of 0 to 99 but 500, or these 500 (`heldout`), chosen once and for all.

    Columns: `prompt` (`"17+25="`) and `answer` (`"042"`).
    """

    def __init__(self, split: str, columns: Columns) -> None:
        """Choose the split's pairs.

        Raises:
            DataError: for another split or another column.
        """
        order = np.random.default_rng(_SEED).permutation(NUM_PAIRS)
        splits = {"train": order[NUM_HELDOUT:], "heldout": order[:NUM_HELDOUT]}
        if split not in splits:
            raise DataError(f"the addition data has no split {split!r}, choose one of {sorted(splits)}")
        self._pairs = splits[split]
        self._columns = columns
        check_names(("prompt", "answer"), columns, "the addition data")

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` of the split."""
        first, second = divmod(int(self._pairs[index]), 100)
        row = {"prompt": f"{first:02d}+{second:02d}=", "answer": f"{first + second:03d}"}
        return checked(row, self._columns, f"the addition data, row {index}")
