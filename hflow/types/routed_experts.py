"""`RoutingFormat`: how the experts that computed a token are stored."""

from __future__ import annotations

from dataclasses import dataclass

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
