"""Modules that are imported when a body first uses them: `algo`, which needs torch, and `sandboxes`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any


class LazyModule:
    """A module that is imported at the first use of a name in it. It is pickled by name."""

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


__all__ = ["LazyModule", "algo", "sandboxes"]

if TYPE_CHECKING:
    from hflow import algo
    from hflow.sandboxes import providers as sandboxes
else:
    algo = LazyModule("hflow.algo")
    sandboxes = LazyModule("hflow.sandboxes.providers")
