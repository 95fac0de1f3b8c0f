"""`RecordedKind`: something that an engine records of a sequence beside its tokens, and the registry.

To add one, write a module with a `RecordedKind`, and add one line to `RECORDED_KINDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from hflow.base.errors import ReturnError
from hflow.base.registry import Registry
from hflow.types.units import Unit

if TYPE_CHECKING:  # numpy takes a tenth of the time of a command that does not compute
    import numpy.typing as npt

RECORDED_KINDS = Registry(
    "recorded kind",
    "hflow.recorded",
    {
        "routed_experts": "hflow.types.routed_experts:RECORDED",
        "sampling_mask": "hflow.types.sampling_mask:RECORDED",
    },
)
"""The kinds, each with its descriptor."""

Rows = tuple[bytes, ...]
"""The record of one kind: an entry for each of the first tokens of a sequence, or one for the sequence."""
Recorded = Mapping[str, Rows]
"""Kind -> the record of a sequence."""


@dataclass(frozen=True)
class RowFormat:
    """The numbers of one entry of a record, or how many bytes it is expected to have."""

    dtype: str
    """Name of the numpy dtype of a number; `object` for entries that are bytes of any number."""
    shape: tuple[int, ...] = ()
    expected_bytes: int = 0
    """What a plan counts for an entry of any number of bytes."""

    @classmethod
    def varying(cls, expected_bytes: int) -> RowFormat:
        """Return the format of entries that differ in their number of bytes."""
        return cls("object", (), expected_bytes)

    @property
    def is_varying(self) -> bool:
        """Whether entries differ in their number of bytes."""
        return self.dtype == "object"

    @property
    def num_bytes(self) -> int:
        """Bytes of an entry, as far as they are known before it is recorded."""
        import numpy as np

        return self.expected_bytes or math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class RecordedKind:
    """Everything that hflow must know about what an engine records, outside the code that writes and uses it.

    It is a field of the streams of a generate node that records it, under the kind's name.
    """

    name: str
    row_format: Callable[[Any, Mapping[str, Any]], RowFormat | None]
    """`ModelShape` (`shapes/model_shape.py`) and the generate node's options -> the format of an entry; None:
    the model has nothing to record."""
    option: str = ""
    """The option of a generate node that requests it. Empty: an engine records it without a request, and only
    the trajectory has it."""
    unit: Unit = Unit.TOKEN
    """What has an entry: each of the first tokens of a sequence (`TOKEN`), or the sequence (`SEQUENCE`)."""
    replayed_in: Literal["", "layers", "outputs"] = ""
    """Which train and infer nodes read it, without their bodies: those of the generating model, for its
    layers; or those of any model with the head `lm`, for its log-probs."""

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

        All bits of an entry that is not recorded are set: it is the largest unsigned number, -1 or NaN. One
        that may have any number of bytes has none.

        Raises:
            ReturnError: if an entry has another size.
        """
        import numpy as np

        num_rows = self.num_rows(num_tokens)
        if form.is_varying:
            values = np.full(num_rows, b"", dtype=object)
            values[: len(rows)] = rows
            return values
        packed = b"".join(rows)
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
