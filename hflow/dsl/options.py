"""Options of decorators: their types, defaults and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hflow.validation import check_value


@dataclass(frozen=True)
class Option:
    """One option of a decorator.

    Attributes:
        type: what it may be, written as `hflow.validation.check_value` reads it.
        default: its value when the recipe does not say.
        minimum: smallest number allowed.
        maximum: largest number allowed.
    """

    type: str
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None

    def check(self, value: Any) -> Any:
        """Return the value as the type wants it, such as an int as a float.

        Raises:
            ValueError: of the wrong type or out of bounds; the message reads after "X is".
        """
        return check_value(value, self.type, self.minimum, self.maximum)


Options = dict[str, Option]

_NAMES = "None | str | tuple[str, ...]"
_POSITIVE = Option("None | float", None, minimum=0.001)

COMMON: Options = {
    "returns": Option(_NAMES),
    "on": Option("None | str"),
    "every": Option("int", 1, minimum=1),
    "after": Option("int", 0, minimum=0),
}
"""Every node has them."""

STREAM: Options = {"group": Option("int", 1, minimum=1)}
"""Nodes that open a stream: samples a prompt."""

POOLED: Options = {
    "timeout": _POSITIVE,
    "retries": Option("int", 0, minimum=0),
    "concurrency": Option("None | int", None, minimum=1),
}
"""Bodies that run sample by sample: seconds a try, further tries, bodies at once."""

SAMPLING: Options = {
    "temperature": Option("float", 1.0, minimum=0.0),
    "top_p": Option("float", 1.0, minimum=0.0, maximum=1.0),
    "top_k": Option("int", 0, minimum=0),
    "max_tokens": Option("int", 128, minimum=1),
    "stop": Option("tuple[str, ...]", ()),
    "tool_format": Option("None | str"),
}
"""How tokens are drawn; `top_k` 0 means all, `max_tokens` is a completion's limit, `tool_format` how
calls are written: `hermes` (the default), or the two characters around one."""

GROUPED: Options = {"min_group": Option("None | int", None, minimum=1)}
"""Nodes that may need several samples of a prompt; a smaller group is refused."""

LEARNING: Options = {
    "reduce": Option("None | str"),
    "minibatches": Option("int", 1, minimum=1),
    "epochs": Option("int", 1, minimum=1),
    "prox": Option("None | 'recompute' | 'loglinear' | 'metrics' | 'none'"),
    "mask": Option("None | str"),
}
"""Train nodes: reduction of the loss, updates a step, source of prox_logprobs, extra loss mask."""

SPEC_FIELDS = ("returns", "on", "every", "after", "group", "per")
"""Options that have a place of their own in a `NodeSpec`."""
