"""Bodies as bytes for other processes: by name where those can import them, else by value."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import cloudpickle

from hflow.errors import RunError


def ship(value: Any, bodies: Iterable[Callable[..., Any]]) -> bytes:
    """Pickle a value that holds bodies.

    A recipe is loaded from its file, as a module that no other process can import: functions of
    such modules travel by value, with the globals that they use.

    Raises:
        RunError: when these hold what cannot travel, such as an open file or a lock.
    """
    modules = {
        name: sys.modules[name] for name in {body.__module__ for body in bodies} if name in sys.modules
    }
    local = [module for module in modules.values() if not _is_importable(module)]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    except (pickle.PicklingError, TypeError) as error:
        raise RunError(
            f"a recipe's bodies run in other processes, but what they use cannot be sent there: {error}; "
            "make such objects inside the body"
        ) from error
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: ModuleType) -> bool:
    """Whether a fresh interpreter with this one's path finds the module's package."""
    return PathFinder.find_spec(module.__name__.partition(".")[0]) is not None
