"""Pickles bodies for other processes: by reference if they can be imported there, else by value."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import cloudpickle

from hflow.errors import RunError


def pickle_with_bodies(value: Any, bodies: Iterable[Callable[..., Any]]) -> bytes:
    """Pickle a value that holds bodies.

    A recipe is loaded from its file, as a module that no other process can import. Functions of such modules
    are pickled by value, with the globals that they use.

    Raises:
        RunError: when these globals cannot be pickled, such as an open file or a lock.
    """
    modules = {
        name: sys.modules[name] for name in {body.__module__ for body in bodies} if name in sys.modules
    }
    by_value = [module for module in modules.values() if not _is_importable(module)]
    for module in by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    except (pickle.PicklingError, TypeError) as error:
        raise RunError(
            f"the recipe's bodies use something that cannot be sent to other processes: {error}; "
            "create such objects inside the body"
        ) from error
    finally:
        for module in by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    """Return whether a fresh interpreter with the same path finds the module's package."""
    return PathFinder.find_spec(module.__name__.partition(".")[0]) is not None
