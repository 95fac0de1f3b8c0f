"""One form for every message about a recipe: place, function, parameter, what to change."""

from __future__ import annotations

from hflow.errors import RecipeError
from hflow.graph.ir import Where


def refusal(where: Where, function: str, text: str, parameter: str | None = None) -> RecipeError:
    """The error for a function (and one of its parameters) of a recipe."""
    return RecipeError(said(where, function, text, parameter))


def said(where: Where, function: str, text: str, parameter: str | None = None) -> str:
    """The line that `refusal` raises and warnings print."""
    subject = f"{function}({parameter})" if parameter else function
    return f"{where}: {subject}: {text}"
