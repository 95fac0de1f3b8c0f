"""`@sandbox`: a tool that runs in a process of its own, without network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hflow.dsl.options import Option
from hflow.dsl.source_location import caller_location
from hflow.graph.errors import recipe_error
from hflow.types.sandbox import ATTRIBUTE, Sandbox

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = {
    "timeout": Option("float", 10.0, minimum=0.001),
    "memory_mb": Option("int", 512, minimum=16),
}


def sandbox(*, timeout: float = 10.0, memory_mb: int = 512) -> Callable[[Function], Function]:
    """Decorate a function whose every call runs in a limited process; called directly, it just runs.

    Args:
        timeout: seconds a call may take.
        memory_mb: address space that a call may take.

    Raises:
        RecipeError: when a limit is not a number in its bounds.
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
