"""Pickles bodies for other processes: by reference if they can be imported there, else by value."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from operator import methodcaller
from types import CodeType, ModuleType
from typing import Any

import cloudpickle

from hflow.base.errors import RunError


def pickle_with_bodies(value: Any, bodies: Iterable[Callable[..., Any]], by_value: bool = False) -> bytes:
    """Pickle a value that holds bodies.

    A recipe is loaded from its file, as a module that no other process can import. Functions of such modules
    are pickled by value, with the globals that they use.

    `by_value` pickles functions by value in any case, for machines without the bodies' modules.

    Raises:
        RunError: when these globals cannot be pickled, such as an open file or a lock.
    """
    modules = {
        name: sys.modules[name] for name in {body.__module__ for body in bodies} if name in sys.modules
    }
    registered = [module for module in modules.values() if by_value or not _is_importable(module)]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        return buffer.getvalue()
    except (pickle.PicklingError, TypeError) as error:
        raise RunError(
            f"the recipe's bodies use something that cannot be sent to other processes: {error}; "
            "create such objects inside the body"
        ) from error
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles code with the name of its file, for errors and stacks. cloudpickle 3.1.3 leaves it out."""

    def reducer_override(self, obj: Any) -> Any:
        """Return a function and its arguments that make an object again."""
        if not isinstance(obj, CodeType):
            return super().reducer_override(obj)
        return methodcaller("replace", co_filename=obj.co_filename), (_Code(obj, self),)


class _Code:
    """Code as cloudpickle pickles it. Loading it needs no module of hflow."""

    def __init__(self, code: CodeType, pickler: _Pickler) -> None:
        self._reduced = pickler.dispatch_table[CodeType](code)

    def __reduce__(self) -> Any:
        return self._reduced


def _is_importable(module: ModuleType) -> bool:
    """Return whether a fresh interpreter with the same path finds the module's package."""
    return PathFinder.find_spec(module.__name__.partition(".")[0]) is not None
