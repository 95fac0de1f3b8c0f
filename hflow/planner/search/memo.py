"""`memo`: results that an object keeps, because a search asks for them again and again."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar, TypeVarTuple

Owner = TypeVar("Owner")
Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def memo(method: Callable[[Owner, *Arguments], Result]) -> Callable[[Owner, *Arguments], Result]:
    """Keep the results of a method by its arguments for as long as its object exists.

    Arguments are hashable and passed by position, so that equal calls have equal keys. Unlike with
    `functools.cache`, results end with their object.
    """
    name = f"_results_of_{method.__name__}"

    @wraps(method)
    def remembered(self: Owner, *arguments: *Arguments) -> Result:
        results: dict[tuple[*Arguments], Result] = vars(self).setdefault(name, {})
        if arguments not in results:
            results[arguments] = method(self, *arguments)
        return results[arguments]

    return remembered
