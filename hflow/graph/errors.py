"""One form for every message about a recipe: place, function, parameter, what to change."""

from __future__ import annotations

from hflow.errors import RecipeError
from hflow.graph.ir import SourceLocation


def recipe_error(
    where: SourceLocation, function: str, text: str, parameter: str | None = None
) -> RecipeError:
    """The error for a function (and one of its parameters) of a recipe."""
    return RecipeError(format_problem(where, function, text, parameter))


def format_problem(where: SourceLocation, function: str, text: str, parameter: str | None = None) -> str:
    """The line that `refusal` raises and warnings print."""
    subject = f"{function}({parameter})" if parameter else function
    return f"{where}: {subject}: {text}"
