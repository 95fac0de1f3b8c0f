"""`@sandbox`: run a tool in its own process, without network access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hflow.dsl.options import Option
from hflow.graph.errors import recipe_error
from hflow.graph.source_location import caller_location
from hflow.types.sandbox import ATTRIBUTE, Sandbox

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {
    "timeout": Option("float", 10.0, minimum=0.001),
    "memory_mb": Option("int", 512, minimum=16),
}


def sandbox(*, timeout: float = 10.0, memory_mb: int = 512) -> Callable[[Function], Function]:
    """Decorate a tool so that `engine.call` runs it in a limited process.

    The function itself is returned unchanged; a direct call runs it in the caller's process.

    Args:
        timeout: seconds that one call may take.
        memory_mb: address space in MiB that one call may use.

    Raises:
        RecipeError: if a limit is not a number or out of bounds.
    """
    where = caller_location()
    limits = {}
    for name, value in (("timeout", timeout), ("memory_mb", memory_mb)):
        try:
            limits[name] = _OPTIONS[name].check(value)
        except ValueError as error:
            raise recipe_error(where, "sandbox", f"{name} is {error}") from error

    def decorate(function: Function) -> Function:
        setattr(function, ATTRIBUTE, Sandbox(**limits))
        return function

    return decorate
