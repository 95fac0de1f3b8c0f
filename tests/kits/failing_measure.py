"""A measurement that fails. A process of its own imports this module, so it imports little."""

from __future__ import annotations

from hflow.base.errors import ConfigError


def fail(backend: str, device: str) -> None:
    raise ConfigError("no hardware file is for 'other'")
