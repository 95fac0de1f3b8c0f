"""Messages about a recipe: `file:line: function(parameter): problem. Fix`."""

from __future__ import annotations

from hflow.base.errors import RecipeError
from hflow.graph.source_location import SourceLocation


def recipe_error(
    where: SourceLocation, function: str, problem: str, parameter: str | None = None
) -> RecipeError:
    """Return the exception for a problem with a function of a recipe, or with one of its parameters."""
    return RecipeError(format_problem(where, function, problem, parameter))


def format_problem(where: SourceLocation, function: str, problem: str, parameter: str | None = None) -> str:
    """Return the message about a problem, for exceptions and warnings.

    A parameter `@NAME` stands for the decorator's option NAME.
    """
    if parameter and parameter.startswith("@"):
        return f"{where}: {function}({parameter[1:]}=): {problem}"
    return f"{where}: {function}({parameter}): {problem}" if parameter else f"{where}: {function}: {problem}"
