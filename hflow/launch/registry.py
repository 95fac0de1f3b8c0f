"""Backends by name, as functions that workers call: they import torch there, not here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hflow.backends.embedded_engine.replay import Draws
    from hflow.backends.interface import ModelSettings, RankPosition


def torch_model(*args: Any) -> Any:
    """The torch training backend."""
    from hflow.backends.torch_model import TorchModel

    return TorchModel(*args)


def megatron_model(settings: ModelSettings, seat: RankPosition) -> Any:
    """The megatron training backend."""
    from hflow.backends.megatron.device import prepare

    prepare(settings.device)  # before anything imports megatron
    from hflow.backends.megatron.backend import MegatronModel

    return MegatronModel(settings, seat)


def embedded_engine(*args: Any) -> Any:
    """The embedded generation engine."""
    from hflow.backends.embedded_engine import EmbeddedEngine

    return EmbeddedEngine(*args)


def recording_engine(draws: Draws, *args: Any) -> Any:
    """The embedded engine, noting what it draws."""
    from hflow.backends.embedded_engine.replay import RecordingEngine

    return RecordingEngine(draws, *args)


def replaying_engine(draws: Draws, *args: Any) -> Any:
    """The embedded engine, drawing what was noted."""
    from hflow.backends.embedded_engine.replay import ReplayingEngine

    return ReplayingEngine(draws, *args)


FACTORIES: Mapping[str, Callable[..., Any]] = {
    "torch": torch_model,
    "megatron": megatron_model,
    "embedded": embedded_engine,
}
