"""Units: what one entry of a field belongs to, a token, a sequence or a group.

A recipe's annotations name units, and type checkers see tensors. At run time an annotation is
`Annotated[..., Unit.X]`, so that hflow reads the unit without importing torch.

Axis letters, used everywhere in hflow: P prompts (groups), G samples of a prompt,
S sequences (samples), T packed tokens, K alternatives per token, V vocabulary, D hidden.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated, Any

__all__ = [
    "Json",
    "Messages",
    "Metrics",
    "PerGroup",
    "PerSequence",
    "PerToken",
    "Provided",
    "Tensor",
    "TensorDict",
    "Text",
    "Unit",
]


class Unit(enum.StrEnum):
    """The unit of a field."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    GROUP = "group"
    TEXT = "text"
    MESSAGES = "messages"
    JSON = "json"
    IMAGE = "image"
    IMAGES = "images"
    PIXELS = "pixels"
    """What a model sees of a sample: the `ProcessedImage`s of its trajectory, which bodies do not read."""

    def widens_to(self, wanted: Unit) -> bool:
        """Return whether a field of this unit can be read as `wanted`: as it is, or repeated.

        A text can be read as messages: one of the user. Messages are JSON. An image is a list of one.
        """
        if self is wanted or (self, wanted) in _OBJECTS_READ_AS:
            return True
        widening_order = [Unit.GROUP, Unit.SEQUENCE, Unit.TOKEN]
        if self not in widening_order or wanted not in widening_order:
            return False
        return widening_order.index(self) < widening_order.index(wanted)

    @property
    def is_object(self) -> bool:
        """Whether a sample has one Python object of it, such as a text, and not numbers."""
        return self in (Unit.TEXT, Unit.MESSAGES, Unit.JSON, Unit.IMAGE, Unit.IMAGES, Unit.PIXELS)


_OBJECTS_READ_AS = (
    (Unit.TEXT, Unit.MESSAGES),
    (Unit.MESSAGES, Unit.JSON),
    (Unit.IMAGE, Unit.IMAGES),
)


class Provided(enum.StrEnum):
    """Marks an annotation that is not a field."""

    METRICS = "metrics"


if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor
else:

    class Tensor:
        """A placeholder for `torch.Tensor` in annotations, which avoids importing torch."""

    class TensorDict:
        """A placeholder for `tensordict.TensorDict` in annotations, which avoids importing torch."""


PerToken = Annotated[Tensor, Unit.TOKEN]
"""A tensor `[T]` (or `[T, K]`), one entry per token of the packed batch."""
PerSequence = Annotated[Tensor, Unit.SEQUENCE]
"""A tensor `[S]`, one entry per sequence."""
PerGroup = Annotated[Tensor, Unit.GROUP]
"""A tensor `[P]`, one entry per group (the samples of one prompt)."""
Text = Annotated[list[str], Unit.TEXT]
"""A list of S strings."""
Messages = Annotated[list[dict[str, Any]], Unit.MESSAGES]
"""The messages of one sample, each a dict with `role` and `content`. Bodies of whole batches read `Json`."""
Json = Annotated[list[Any], Unit.JSON]
"""A list of S JSON values."""
Metrics = Annotated[dict[str, Any], Provided.METRICS]
"""A dict of scalars or tensors of a unit's shape. hflow averages each over its valid entries and logs it."""
