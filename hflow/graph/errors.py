"""Messages about a recipe: `file:line: function(parameter): problem. Fix`.

Locations are those in the user's source.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from hflow.base.errors import RecipeError

_LANGUAGE_PACKAGES = ("hflow.dsl", "hflow.graph", "hflow.rewards.combination", "hflow.rewards.judges")


@dataclass(frozen=True)
class SourceLocation:
    """A line of a source file. It prints as `file:line`."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller_location() -> SourceLocation:
    """Return the innermost line on the stack that is outside of the recipe language's own packages."""
    frame = _user_frame()
    return SourceLocation(relative_path(frame.f_code.co_filename), frame.f_lineno)


def caller_module() -> str:
    """Return the name of the module that contains `caller_location`."""
    return _module_name(_user_frame())


def definition_location(function: Callable[..., Any]) -> SourceLocation:
    """Return the line of a function's definition, or of its first decorator."""
    code = inspect.unwrap(function).__code__
    return SourceLocation(relative_path(code.co_filename), code.co_firstlineno)


def relative_path(path: str) -> str:
    """Return a path relative to the working directory if it is below it, otherwise unchanged."""
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except FileNotFoundError:  # the working directory was deleted
        return path


def _user_frame() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and _module_name(frame).startswith(_LANGUAGE_PACKAGES):
        frame = frame.f_back
    return frame


def _module_name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


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
