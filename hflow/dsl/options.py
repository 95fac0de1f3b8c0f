"""`Option`: the type, default and bounds of a decorator's option, and the tables of options.

`hflow.dsl.verbs` documents what each option means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hflow.base.validation import check_value
from hflow.types.engine import MAX_TEMPERATURE


@dataclass(frozen=True)
class Option:
    """One option of a decorator: `Option("float", 1.0, minimum=0.0)`.

    Args:
        type: alternatives joined by ` | `: `int`, `float`, `bool`, `str`, `None`, a quoted choice such as
            `'none'`, or `tuple[T, ...]` of one of these.
        default: the value if the recipe does not set the option.
        minimum: smallest number allowed.
        maximum: largest number allowed.
    """

    type: str
    default: Any = None
    minimum: float | None = None
    maximum: float | None = None

    def check(self, value: Any) -> Any:
        """Return the value in the option's type: an int becomes a float, a list a tuple.

        Raises:
            ValueError: if it has another type or is out of bounds. The message continues a sentence that
                begins with "X is".
        """
        return check_value(value, self.type, self.minimum, self.maximum)


Options = dict[str, Option]

COMMON: Options = {
    "returns": Option("None | str | tuple[str, ...]"),
    "on": Option("None | str"),
    "every": Option("int", 1, minimum=1),
    "after": Option("int", 0, minimum=0),
}
"""Options of every node."""

STREAM: Options = {"group": Option("int", 1, minimum=1)}
"""Options of nodes that open a stream."""

POOLED: Options = {
    "timeout": Option("None | float", None, minimum=0.001),
    "retries": Option("int", 0, minimum=0),
    "concurrency": Option("None | int", None, minimum=1),
}
"""Options of bodies that run sample by sample."""

RETRIED: Options = {
    "retries": Option("None | int", None, minimum=0),
    "backoff": Option("float", 1.0, minimum=0.0),
}
"""Options of bodies in processes, which may be killed, or wait for services."""

SAMPLING: Options = {
    "temperature": Option("float", 1.0, minimum=0.0, maximum=MAX_TEMPERATURE),
    "top_p": Option("float", 1.0, minimum=0.0, maximum=1.0),
    "top_k": Option("int", 0, minimum=0),
    "max_tokens": Option("int", 128, minimum=1),
    "stop": Option("tuple[str, ...]", ()),
    "tool_format": Option("None | str"),
    "routing_replay": Option("bool", False),
}
"""Options of generation."""

GROUPED: Options = {"min_group": Option("None | int", None, minimum=1)}
"""Options of nodes that may need several samples of a prompt."""

LEARNING: Options = {
    "reduce": Option("None | str"),
    "minibatches": Option("int", 1, minimum=1),
    "epochs": Option("int", 1, minimum=1),
    "prox": Option("None | 'recompute' | 'loglinear' | 'metrics' | 'none'"),
    "mask": Option("None | str"),
}
"""Options of train nodes."""

SPEC_FIELDS = ("returns", "on", "every", "after", "group", "per")
"""Options that are fields of their own in a `NodeSpec`."""
