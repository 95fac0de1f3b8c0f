"""The stateful environments of an episode, as far as every engine treats them alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from hflow.base.errors import RecipeError
from hflow.types.sandbox import sandbox_of


def environment_number(tool: Callable[..., Any], environments: Sequence[object]) -> int | None:
    """Return which environment's method a tool is; None if it is a function or a method of a class.

    Args:
        tool: what is called with `engine.call`.
        environments: those that `engine.environment` has created for the episode, in order.

    Raises:
        RecipeError: for a method of another object, whose state would be lost when the episode is replayed,
            and for a method with a sandbox.
    """
    if not inspect.ismethod(tool) or inspect.isclass(tool.__self__):
        return None
    owner, name = tool.__self__, f"{type(tool.__self__).__name__}.{tool.__name__}"
    number = next((i for i, environment in enumerate(environments) if environment is owner), None)
    if number is None:
        kind = type(owner).__name__
        raise RecipeError(
            f"engine.call({name}) would lose the state of its object when the episode is replayed. Create "
            f"the object with `await engine.environment({kind}, ...)`, or call a function"
        )
    if sandbox_of(tool) is not None:
        raise RecipeError(
            f"{name} has a sandbox, whose process does not keep the state of its object. Remove @sandbox, or "
            "call a function"
        )
    return number
