"""Two-digit additions: a task whose answers are known and which a tiny model can learn."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hflow.data.row_schema import Columns, check_names, checked
from hflow.errors import DataError

NUM_PAIRS = 10_000
NUM_HELDOUT = 500
_SEED = 0
_FLAWS = np.random.default_rng(_SEED).integers(3 * 9, size=NUM_PAIRS)
"""For each pair, the place of a wrong digit and how far it is off: `9 * place + distance - 1`."""


class Addition:
    """All pairs of 0 to 99 but 500, or these 500 (`heldout`), chosen once and for all.

    Columns: `prompt` (`"17+25="`) and `answer` (`"042"`).
    """

    names: ClassVar[tuple[str, ...]] = ("prompt", "answer")

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
        check_names(self.names, columns, "the addition data")

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` of the split."""
        row = self._row(*divmod(int(self._pairs[index]), 100))
        return checked(row, self._columns, f"the addition data, row {index}")

    def _row(self, first: int, second: int) -> dict[str, str]:
        return {"prompt": f"{first:02d}+{second:02d}=", "answer": f"{first + second:03d}"}


class AdditionPairs(Addition):
    """The same prompts, each with the right sum and a wrong one, of which one digit is another.

    Columns: `prompt`, `chosen` and `rejected`. Which digit and what it becomes is drawn once for each prompt.
    """

    names: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    def _row(self, first: int, second: int) -> dict[str, str]:
        right = f"{first + second:03d}"
        place, more = divmod(int(_FLAWS[100 * first + second]), 9)
        digit = (int(right[place]) + 1 + more) % 10
        wrong = f"{right[:place]}{digit}{right[place + 1 :]}"
        return {"prompt": f"{first:02d}+{second:02d}=", "chosen": right, "rejected": wrong}
