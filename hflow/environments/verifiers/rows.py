"""Rows of an environment of the package `verifiers`: `data.NAME.generator=verifiers:ENV`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, DataError, EpisodeError
from hflow.data.rows.row_schema import RowSchema
from hflow.environments.client import host_of
from hflow.environments.interface import COMMON_KNOBS

SPLITS = ("train", "heldout")


class VerifiersRows:
    """The examples of an environment. Columns: `example`, which episodes receive, and those of the examples.

    Args:
        task: the environment, as in the node's `env`.
        split: `train`, or `heldout`, the environment's examples for evaluation.
        arguments: `args`, the environment's, also as JSON text; `python`, `requirements` and
            `start_timeout`, as for the node; `size`, the most rows; and `select`, which tasks of a taskset
            are rows.
        schema: the columns to read.

    Raises:
        DataError: for an unknown split or argument, or if the environment cannot be loaded.
    """

    files: tuple[Path, ...] = ()
    """It has none."""
    starts_program = True
    """Only runs open it: a plan is made where the environment may not be installed."""

    def __init__(self, task: str, split: str, arguments: Mapping[str, Any], schema: RowSchema) -> None:
        if split not in SPLITS:
            raise DataError(f"verifiers has no split {split!r}; set {schema.key}.split to one of {SPLITS}")
        given = dict(arguments)
        size, args, select = given.pop("size", -1), given.pop("args", {}), given.pop("select", {})
        settings = {"env": task, "args": args if isinstance(args, str) else json.dumps(args)}
        settings |= {name: given.pop(name) for name in COMMON_KNOBS if name in given}
        if given:
            raise DataError(
                f"{schema.key}.arguments.{next(iter(given))} does not exist; there are args, python, "
                "requirements, select, size and start_timeout"
            )
        try:
            self._rows = host_of("verifiers", settings).request("rows", split=split, size=size, select=select)
        except (ConfigError, EpisodeError) as error:
            raise DataError(f"{schema.key}.generator is verifiers:{task}, but {error}") from None
        self._task, self._schema = task, schema

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return row `index`."""
        example = self._rows[index]
        return self._schema.row({**example, "example": example}, self.where(index))

    def where(self, index: int) -> str:
        """Return the name of a row in errors."""
        return f"verifiers:{self._task}, row {index}"
