"""Rows of the tasks of the package `reasoning-gym`: `data.NAME.generator=reasoning-gym:chain_sum`.

A task makes as many questions as one wants, and may ask the same one again. So a question belongs to a split
by its text: about one in ten is held out. Questions of both splits are never the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from hflow.base.errors import DataError, nearest, reason_of
from hflow.data.rows.row_schema import RowSchema

SPLITS = ("train", "heldout")
SIZES: Mapping[str, int] = {"train": 2000, "heldout": 200}
"""Rows of a split, unless the argument `size` says how many."""
HELD_OUT_IN = 10
MAX_QUESTIONS_PER_ROW = 100
"""Questions that are made for a row at most, until there is one of the split."""


class ReasoningGym:
    """The questions of a task. Columns: `prompt`, `answer` and `entry`, from which an answer is scored.

    An entry is that of the task as JSON, with the task, the arguments and the question's number, from which
    `rewards.reasoning_gym` makes it again: scorers may need values that JSON does not have.

    Args:
        task: the name of the task, such as `chain_sum`.
        split: `train`, or `heldout`.
        arguments: the settings of the task, such as `{min_terms: 2}`, with `seed`, and `size`, the number of
            rows.
        schema: the columns to read.

    Raises:
        DataError: if the package is not installed, or for an unknown task, split, column or argument.
    """

    names = ("prompt", "answer", "entry")
    files: tuple[Path, ...] = ()
    """It has none."""

    def __init__(self, task: str, split: str, arguments: Mapping[str, Any], schema: RowSchema) -> None:
        if split not in SPLITS:
            raise DataError(
                f"reasoning-gym has no split {split!r}; set {schema.key}.split to one of {SPLITS}"
            )
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise DataError(
                f"{schema.key}.generator needs reasoning-gym, which cannot be imported ({error}); "
                "pip install 'hflow-rl[reasoning-gym]'"
            ) from error
        if task not in DATASETS:
            raise DataError(
                f"{schema.key}.generator is reasoning-gym:{task}, but there is no such task"
                f"{nearest(task, DATASETS)}"
            )
        own = dict(arguments)
        self._size = own.pop("size", SIZES[split])
        if type(self._size) is not int or self._size < 1:
            raise DataError(f"{schema.key}.arguments.size is {self._size!r}; set it to a number of rows")
        own = {"seed": 0, **own, "size": MAX_QUESTIONS_PER_ROW * self._size}
        try:
            self._made = reasoning_gym.create_dataset(task, **own)
        except Exception as error:  # the tasks assert, and raise what they like
            raise DataError(
                f"{schema.key}.arguments do not fit reasoning-gym:{task}: {reason_of(error)}"
            ) from error
        self._task, self._is_held_out, self._schema = task, split == "heldout", schema
        self._arguments = own
        schema.check(self.names, f"reasoning-gym:{task}")

    def __len__(self) -> int:
        return len(self._questions)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index` of the split."""
        number = self._questions[index]
        entry = self._made[number]
        row = {
            "prompt": entry["question"],
            "answer": str(entry["answer"]),
            "entry": {
                **json.loads(json.dumps(entry, default=str)),
                "task": self._task,
                "number": number,
                "arguments": self._arguments,
            },
        }
        return self._schema.row(row, self.where(index))

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"reasoning-gym:{self._task}, row {index}"

    @cached_property
    def _questions(self) -> list[int]:
        """The questions of the split, by their numbers in the task. Those that are held out differ."""
        found: list[int] = []
        seen: set[str] = set()
        for number in range(len(self._made)):
            if len(found) == self._size:
                break
            question = self._made[number]["question"]
            if _is_held_out(question) == self._is_held_out and question not in seen:
                found.append(number)
                if self._is_held_out:
                    seen.add(question)
        return found


def _is_held_out(question: str) -> bool:
    return hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_IN == 0
