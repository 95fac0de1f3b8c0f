"""Units: what one entry of a field speaks of.

A recipe's annotations name units; a type checker sees the tensors behind them. At run time
an annotation is `Annotated[..., Unit.X]`, so that the unit can be read without importing torch.

Axis letters, used everywhere in hflow: P prompts (groups), G samples of a prompt,
S sequences (samples), T packed tokens, K alternatives per token, V vocabulary, D hidden.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

__all__ = ["Json", "Metrics", "PerGroup", "PerSequence", "PerToken", "Provided", "Tensor", "Text", "Unit"]


class Unit(enum.StrEnum):
    """The unit of a field."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GROUP = "group"
    TEXT = "text"
    JSON = "json"

    def widens_to(self, wanted: Unit) -> bool:
        """Whether a field of this unit may be read as `wanted` (equal, or repeated)."""
        if self is wanted:
            return True
        order = [Unit.GROUP, Unit.SEQUENCE, Unit.TOKEN]
        return self in order and wanted in order and order.index(self) < order.index(wanted)


class Provided(enum.StrEnum):
    """Marks an annotation that the framework fills in, which is therefore no edge."""

    METRICS = "metrics"


if TYPE_CHECKING:
    from torch import Tensor
else:

    class Tensor:
        """Stands for `torch.Tensor` in annotations, without importing torch."""


PerToken = Annotated[Tensor, Unit.TOKEN]
"""A tensor `[T]` (or `[T, K]`), one entry a token of the packed batch."""
PerSequence = Annotated[Tensor, Unit.SEQUENCE]
"""A tensor `[S]`, one entry a sequence."""
PerGroup = Annotated[Tensor, Unit.GROUP]
"""A tensor `[P]`, one entry a group (the samples of one prompt)."""
Text = Annotated[list[str], Unit.TEXT]
"""A list of S strings."""
Json = Annotated[list[Any], Unit.JSON]
"""A list of S JSON values."""
Metrics = Annotated[dict[str, Any], Provided.METRICS]
"""A dict of scalars or unit-shaped tensors, averaged over the valid entries and logged."""
