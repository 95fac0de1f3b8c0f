"""`@rows`: a function of the recipe that makes the rows of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hflow.graph.errors import caller_location, recipe_error

Function = TypeVar("Function", bound=Callable[..., Any])

_ATTRIBUTE = "__hflow_rows__"


def rows(function: Function) -> Function:
    """Decorate a generator function that yields rows, each a dict of columns; it may do so without end.

    `data.NAME.generator=FUNCTION` reads them, with `data.NAME.arguments` as arguments. If the function has a
    parameter `split`, it receives `data.NAME.split`. Every worker calls it, so each call must yield the same
    rows: draw from a `random.Random(seed)` of its own.

    Raises:
        RecipeError: if it does not yield.
    """
    if not inspect.isgeneratorfunction(function):
        problem = "@rows needs a generator function. Yield each row as a dict of columns"
        raise recipe_error(caller_location(), getattr(function, "__name__", repr(function)), problem)
    setattr(function, _ATTRIBUTE, True)
    return function


def row_functions(names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return those of a module's values that `rows` decorates, by name."""
    return {name: value for name, value in names.items() if getattr(value, _ATTRIBUTE, None) is True}
