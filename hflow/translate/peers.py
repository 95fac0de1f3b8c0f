"""`peers`: the libraries whose configurations can be translated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hflow.translate import trl, verl
from hflow.translate.given import Given
from hflow.translate.recipe import RecipeDraft
from hflow.translate.table import Row


@dataclass(frozen=True)
class Peer:
    """A library, its keys, and the translation of a file with them."""

    name: str
    version: str
    """The version whose keys the table has."""
    source: str
    """Where the keys are, for the documentation."""
    defaults: Mapping[str, Any]
    """Every key and its default."""
    tables: Mapping[str, Sequence[Row]]
    """Title of a section of the documentation -> its rows."""
    translate: Callable[[Given, str | None], RecipeDraft]
    """Takes the values of a file, and the cluster that the user named, such as `h100-1x8`; None: none."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return tuple(row for rows in self.tables.values() for row in rows)

    def num_known(self, keys: Sequence[str]) -> int:
        """Return the number of keys that are keys of this library."""
        return sum(key in self.defaults for key in keys)

    def given(self, values: Mapping[str, Any]) -> Given:
        """Return the values of a file, by dotted key, for `translate`."""
        return Given(values, self.rows, self.defaults)


def _peer(name: str, version: str, source: str, module: Any) -> Peer:
    """Return a library whose keys and defaults are in `keys/NAME.json`."""
    file = Path(__file__).parent / "keys" / f"{name.lower()}.json"
    defaults = json.loads(file.read_text(encoding="utf-8"))
    return Peer(name, version, source, defaults, module.TABLES, module.translate)


@cache
def peers() -> tuple[Peer, ...]:
    """Return the libraries whose configurations can be translated."""
    return (
        _peer("verl", "0.9.1", "`verl/trainer/config/ppo_trainer.yaml`", verl),
        _peer("TRL", "1.16.0", "`GRPOConfig`, and what `trl grpo` takes beside it", trl),
    )
