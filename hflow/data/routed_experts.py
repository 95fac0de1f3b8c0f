"""The column of the experts that computed each token, for routing replay.

Axes: T tokens, K entries of a token (`RoutingFormat`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hflow.base.errors import ReturnError
from hflow.types.routed_experts import RoutingFormat

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
    """Return which of the tokens `[T, K]` have a record: bool `[T]`."""
    unknown = np.array(-1).astype(rows.dtype)
    recorded: npt.NDArray[np.bool_] = rows[:, 0] != unknown
    return recorded
