"""`@rows` and `@sampler`: functions of the recipe that make the rows of a dataset, and choose the next."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hflow.graph.errors import caller_location, recipe_error
from hflow.types.group_result import SAMPLER_PARAMETERS

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_ATTRIBUTE = "__hflow_data__"


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
    setattr(function, _ATTRIBUTE, rows)
    return function


def sampler(function: Function) -> Function:
    """Decorate a function that chooses the next row of the trained dataset from earlier results.

    `data.NAME.sampler=FUNCTION` calls `function(state, finished, position, order, **arguments)` for each
    group, with `data.NAME.sampler_arguments`. It returns the row and a short reason, which `hflow why` shows.
    It may change `state`, a dict of JSON values that checkpoints include, and must depend on nothing else.

    - `finished`: the groups that have ended since the last call (`GroupResult`: `row`, `rewards`, `mean`,
      `spread`, `is_refused`). Those of a batch, and those refused meanwhile, come together.
    - `position`: the number of rows drawn before.
    - `order`: the order without a sampler: `order.num_rows`, `order.row(position)`.

    Raises:
        RecipeError: for other parameters.
    """
    parameters = list(inspect.signature(function).parameters.values())
    first = tuple(parameter.name for parameter in parameters[: len(SAMPLER_PARAMETERS)])
    others = parameters[len(SAMPLER_PARAMETERS) :]
    if first != SAMPLER_PARAMETERS or any(other.kind is not other.KEYWORD_ONLY for other in others):
        problem = "@sampler needs the parameters (state, finished, position, order); add its own after a *"
        raise recipe_error(caller_location(), getattr(function, "__name__", repr(function)), problem)
    setattr(function, _ATTRIBUTE, sampler)
    return function


def functions_with(decorator: Decorator, names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return those of a module's values that `rows` or `sampler` decorates, by name."""
    return {name: value for name, value in names.items() if getattr(value, _ATTRIBUTE, None) is decorator}
