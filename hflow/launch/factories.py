"""Backends by name, as functions that workers call: they import torch there, not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def torch_model(*args: Any) -> Any:
    """The torch training backend."""
    from hflow.backends.torch_model import TorchModel

    return TorchModel(*args)


def embedded_engine(*args: Any) -> Any:
    """The embedded generation engine."""
    from hflow.backends.embedded_engine import EmbeddedEngine

    return EmbeddedEngine(*args)


FACTORIES: Mapping[str, Callable[..., Any]] = {"torch": torch_model, "embedded": embedded_engine}
