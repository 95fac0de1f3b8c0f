"""The experts that computed each token, for routing replay: `RoutingFormat`, and the rows of a column.

Axes: T tokens, K entries of a token (`RoutingFormat`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.base.errors import ReturnError

ROUTED_EXPERTS = "routed_experts"
"""The field with the experts that computed each token, of streams whose source has `routing_replay`."""


@dataclass(frozen=True)
class RoutingFormat:
    """The row of a token: the experts of each layer that has experts, first layer first.

    Entries are `uint8`, or `int16` for 256 experts or more. The row of a token of which nothing is recorded
    has all bits set.
    """

    num_layers: int
    """Layers with experts."""
    per_token: int
    """Experts of a token in each of them."""
    num_experts: int
    """Experts of a layer."""

    @property
    def dtype(self) -> str:
        """Name of the numpy dtype of an entry."""
        return "uint8" if self.num_experts < 256 else "int16"

    @property
    def num_entries(self) -> int:
        """Entries of a row."""
        return self.num_layers * self.per_token

    @property
    def num_bytes(self) -> int:
        """Bytes of a row."""
        return self.num_entries * (1 if self.dtype == "uint8" else 2)


Rows = npt.NDArray[Any]


def pack_rows(recorded: Sequence[bytes], num_tokens: int, form: RoutingFormat) -> Rows:
    """Return the rows `[T, K]` of a sample's tokens, of which the first ones are recorded.

    Raises:
        ReturnError: if a recorded row has another size.
    """
    packed = b"".join(recorded)
    if len(packed) != len(recorded) * form.num_bytes:
        raise ReturnError(
            f"routed_experts of a trajectory has {len(packed)} bytes for {len(recorded)} tokens, not "
            f"{form.num_bytes} each, so another model recorded it. Return a trajectory of this node's engine"
        )
    packed += b"\xff" * form.num_bytes * (num_tokens - len(recorded))
    return np.frombuffer(packed, form.dtype).reshape(num_tokens, form.num_entries)


def is_recorded(rows: Rows) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens `[T, K]` that have a record: bool `[T]`."""
    unknown = np.array(-1).astype(rows.dtype)
    recorded: npt.NDArray[np.bool_] = rows[:, 0] != unknown
    return recorded
