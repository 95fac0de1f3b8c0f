"""`RecordedKind`: something that an engine records of a sequence beside its tokens, and the registry.

To add one, write a module with a `RecordedKind`, and add one line to `RECORDED_KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.base.errors import ReturnError
from hflow.base.registry import Registry
from hflow.types.units import Unit

RECORDED_KINDS = Registry(
    "recorded kind", "hflow.recorded", {"routed_experts": "hflow.types.routed_experts:RECORDED"}
)
"""The kinds, each with its descriptor."""

Rows = tuple[bytes, ...]
"""The record of one kind: an entry for each of the first tokens of a sequence, or one for the sequence."""
Recorded = Mapping[str, Rows]
"""Kind -> the record of a sequence."""


@dataclass(frozen=True)
class RowFormat:
    """The numbers of one entry of a record."""

    dtype: str
    """Name of the numpy dtype of a number."""
    shape: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of an entry."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class RecordedKind:
    """Everything that hflow must know about what an engine records, outside the code that writes and uses it.

    It is a field of the streams of a generate node that records it, under the kind's name.
    """

    name: str
    row_format: Callable[[Any], RowFormat | None]
    """`ModelShape` (`planner/plan/model_shape.py`) -> the format of an entry; None: the model has nothing to
    record."""
    option: str = ""
    """The option of a generate node that requests it. Empty: an engine records it without a request, and only
    the trajectory has it."""
    unit: Unit = Unit.TOKEN
    """What has an entry: each of the first tokens of a sequence (`TOKEN`), or the sequence (`SEQUENCE`)."""
    is_replayed: bool = False
    """Whether each node that trains or infers with the generating model reads it, without its body."""

    def num_rows(self, num_tokens: int) -> int:
        """Return the number of entries of a sequence that is recorded as a whole."""
        return num_tokens if self.unit is Unit.TOKEN else 1

    def extend(self, first: Rows, later: Rows) -> Rows:
        """Return the record of a sequence that was computed twice.

        Where both passes recorded a token, the first one counts: it computed the distribution from which the
        next token was drawn. Of a whole sequence, the later pass knows more.
        """
        if self.unit is Unit.TOKEN:
            return first + later[len(first) :]
        return later or first

    def cut(self, rows: Rows, num_tokens: int) -> Rows:
        """Return the record of a sequence's first tokens. The entry of a whole sequence is left out."""
        return rows[:num_tokens] if self.unit is Unit.TOKEN else ()

    def pack(self, rows: Rows, num_tokens: int, form: RowFormat) -> npt.NDArray[Any]:
        """Return the record of a sample as the values of its field: `[T, *shape]`, or `[1, *shape]`.

        All bits of an entry that is not recorded are set: it is the largest unsigned number, -1 or NaN.

        Raises:
            ReturnError: if an entry has another size.
        """
        packed, num_rows = b"".join(rows), self.num_rows(num_tokens)
        if len(packed) != len(rows) * form.num_bytes:
            raise ReturnError(
                f"{self.name} of a trajectory has {len(packed)} bytes for {len(rows)} {self.unit}s, not "
                f"{form.num_bytes} each, so another model recorded it. Return a trajectory of this node's "
                "engine"
            )
        packed += b"\xff" * form.num_bytes * (num_rows - len(rows))
        return np.frombuffer(packed, form.dtype).reshape(num_rows, *form.shape)


@cache
def recorded_kind(name: str) -> RecordedKind:
    """Return the descriptor of a kind.

    Raises:
        PlanError: for an unknown name.
    """
    return RECORDED_KINDS.describe(name, RecordedKind)


def requestable_kinds() -> tuple[RecordedKind, ...]:
    """Return the kinds that an option of a generate node requests. All are hflow's own, as options are."""
    return tuple(kind for kind in map(recorded_kind, RECORDED_KINDS.own) if kind.option)


def requested_kinds(options: Mapping[str, Any]) -> tuple[RecordedKind, ...]:
    """Return the kinds that a node with these options records."""
    return tuple(kind for kind in requestable_kinds() if options.get(kind.option))


def extend_recorded(first: Recorded, later: Recorded) -> dict[str, Rows]:
    """Return the records of a sequence that was computed twice."""
    return {
        name: recorded_kind(name).extend(first.get(name, ()), later.get(name, ()))
        for name in first.keys() | later.keys()
    }


def cut_recorded(recorded: Recorded, num_tokens: int) -> dict[str, Rows]:
    """Return the records of a sequence's first tokens."""
    return {name: recorded_kind(name).cut(rows, num_tokens) for name, rows in recorded.items()}


def check_recorded(recorded: Recorded, num_tokens: int) -> None:
    """Check that no record has more entries than its sequence.

    Raises:
        ValueError: if one has.
    """
    for name, rows in recorded.items():
        if len(rows) > recorded_kind(name).num_rows(num_tokens):
            raise ValueError(f"{name} has {len(rows)} entries, but the trajectory has {num_tokens} tokens")
