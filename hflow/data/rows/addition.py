"""The rows of two-digit additions, which a tiny model can learn and whose answers are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar

from hflow.base.errors import DataError
from hflow.data.rows.row_schema import RowSchema

NUM_PAIRS = 10_000
NUM_HELDOUT = 500
_SEED = 0


@cache
def _errors() -> Sequence[int]:
    """Return for each pair the position of a wrong digit and its offset, as `9 * position + offset - 1`."""
    import numpy as np

    errors: list[int] = np.random.default_rng(_SEED).integers(3 * 9, size=NUM_PAIRS).tolist()
    return errors


class Addition:
    """The pairs of numbers from 0 to 99: all but 500 (split `train`) or these 500 (`heldout`).

    Columns: `prompt` (`"17+25="`) and `answer` (`"042"`). The split is fixed.
    """

    names: ClassVar[tuple[str, ...]] = ("prompt", "answer")
    files: tuple[Path, ...] = ()
    """It has none."""

    def __init__(self, task: str, split: str, arguments: Mapping[str, Any], schema: RowSchema) -> None:
        """Select the split's pairs.

        Raises:
            DataError: if the split or a column is unknown, or for a task or arguments, which it has none of.
        """
        if task or arguments:
            raise DataError(
                f"the addition data takes neither a task nor arguments; remove {schema.key}.arguments"
            )
        splits = {"train": slice(NUM_HELDOUT, None), "heldout": slice(NUM_HELDOUT)}
        if split not in splits:
            raise DataError(f"the addition data has no split {split!r}; choose one of {sorted(splits)}")
        self._split = splits[split]
        self._schema = schema
        schema.check(self.names, "the addition data")

    @cached_property
    def _pairs(self) -> Sequence[int]:
        """The split's pairs, as `100 * first + second`."""
        import numpy as np

        pairs: list[int] = np.random.default_rng(_SEED).permutation(NUM_PAIRS)[self._split].tolist()
        return pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of the split."""
        row = self._row(*divmod(self._pairs[index], 100))
        return self._schema.row(row, self.where(index))

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"the addition data, row {index}"

    def _row(self, first: int, second: int) -> dict[str, Any]:
        return {"prompt": f"{first:02d}+{second:02d}=", "answer": f"{first + second:03d}"}


class AdditionChat(Addition):
    """The same sums as conversations: `prompt` is a message of the user, such as `17+25`."""

    def _row(self, first: int, second: int) -> dict[str, Any]:
        message = {"role": "user", "content": f"{first:02d}+{second:02d}"}
        return {"prompt": [message], "answer": f"{first + second:03d}"}


class AdditionPairs(Addition):
    """The same prompts, each with the right sum and a wrong one that differs in one digit.

    Columns: `prompt`, `chosen` and `rejected`. The wrong digit and its value are fixed for each prompt.
    """

    names: ClassVar[tuple[str, ...]] = ("prompt", "chosen", "rejected")

    def _row(self, first: int, second: int) -> dict[str, Any]:
        right = f"{first + second:03d}"
        position, offset = divmod(_errors()[100 * first + second], 9)
        digit = (int(right[position]) + 1 + offset) % 10
        wrong = f"{right[:position]}{digit}{right[position + 1 :]}"
        return {"prompt": f"{first:02d}+{second:02d}=", "chosen": right, "rejected": wrong}
