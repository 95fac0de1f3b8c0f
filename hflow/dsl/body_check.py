"""`checked_by`: a check of a body's knobs and inputs, made when its recipe is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any, TypeVar

ATTRIBUTE = "__hflow_check__"
"""The attribute of a function that holds its check."""

BodyCheck = Callable[[Mapping[str, Any], Collection[str]], str | None]
"""Takes the knobs and the decorator's options, and the names of the parameters that a field is bound to.
Returns what is wrong and how to fix it, or None."""

Function = TypeVar("Function", bound=Callable[..., Any])


def checked_by(check: BodyCheck) -> Callable[[Function], Function]:
    """Attach a check to a body, below the decorator that makes it a node."""

    def attach(body: Function) -> Function:
        setattr(body, ATTRIBUTE, check)
        return body

    return attach


def check_of(body: Callable[..., Any]) -> BodyCheck | None:
    """Return the check of a body, if it has one."""
    return getattr(body, ATTRIBUTE, None)


def missing_extra(extra: str, *packages: str) -> str | None:
    """Return what to install if a package of an optional part of hflow is missing.

    Args:
        extra: the extra of the distribution that brings the packages.
        packages: importable names.
    """
    missing = [package for package in packages if find_spec(package) is None]
    return f"it needs {', '.join(missing)}: pip install 'hflow[{extra}]'" if missing else None
