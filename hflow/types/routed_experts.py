"""The experts that computed each token, a `RecordedKind`.

Nodes that replay the record compute with the engine's choice: Rollout Routing Replay (Ma et al. 2025,
arXiv:2510.11370).

Axes: T tokens, L layers with experts, K experts of a token in a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hflow.types.recorded import RecordedKind, RowFormat

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ROUTED_EXPERTS = "routed_experts"
"""The field with the experts that computed each token, `[T, L * K]`."""


def routing_format(num_layers: int, per_token: int, num_experts: int) -> RowFormat:
    """Return the format of a token's experts: those of each layer that has experts, first layer first.

    Entries are `uint8`, or `int16` for 256 experts or more. There are L layers, and K experts per token.
    """
    return RowFormat("uint8" if num_experts < 256 else "int16", (num_layers * per_token,))


def is_recorded(rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the tokens `[T, L * K]` that have a record: bool `[T]`."""
    import numpy as np

    unknown = np.array(-1).astype(rows.dtype)
    recorded: npt.NDArray[np.bool_] = rows[:, 0] != unknown
    return recorded


def _format(shape: Any, options: Mapping[str, Any]) -> RowFormat | None:
    experts = shape.experts
    if experts is None:
        return None
    num_layers = sum(map(shape.has_experts, range(shape.num_layers)))
    return routing_format(num_layers, experts.per_token, experts.num)


RECORDED = RecordedKind(ROUTED_EXPERTS, _format, option="routing_replay", replayed_in="layers")
