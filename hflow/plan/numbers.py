"""The one number of a sample that each per-sample body tells the controller."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.types import Unit

PREFERRED = ("reward", "score")


def told_number(returns: Iterable[tuple[str, str]]) -> str | None:
    """The field `reward`, else `score`, else the first number a sample; None where there is none.

    Tensors stay on the workers; this is what a person wants to know of a sample afterwards.

    Args:
        returns: (field, unit) of each field that the body returns.
    """
    numbers = [field for field, unit in returns if unit == Unit.SEQUENCE and field != "keep"]
    return next((field for field in PREFERRED if field in numbers), next(iter(numbers), None))
