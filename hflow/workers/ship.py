"""Bodies as bytes for child processes: by name where the child can import them, else by value."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

import cloudpickle


def ship(body: Callable[..., Any]) -> bytes:
    """Pickle a body. A recipe loaded from a file has a module that no other process can import."""
    module = sys.modules.get(body.__module__)
    if module is None or module.__name__ == "__main__" or _importable(module.__name__):
        return bytes(cloudpickle.dumps(body))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(body))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    """Whether a fresh interpreter with this one's path finds the module's package."""
    return PathFinder.find_spec(name.partition(".")[0]) is not None
