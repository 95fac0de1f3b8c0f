"""`algo` for recipes: reading one imports no torch, calling a body does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module and imports it at the first use of a name in it. Pickles by name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)

    def __reduce__(self) -> tuple[type[LazyModule], tuple[str]]:
        return LazyModule, (self._name,)

    def __repr__(self) -> str:
        return f"<{self._name}, imported at its first use>"


__all__ = ["LazyModule", "algo"]

if TYPE_CHECKING:
    from hflow import algo
else:
    algo = LazyModule("hflow.algo")
