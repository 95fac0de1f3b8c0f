"""Options of the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hflow.errors import ConfigError, nearest


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine. They change speed and memory, but not what is drawn."""

    max_running: int = 256
    """Maximum sequences that draw a token in one step; the others wait."""
    max_tokens_per_step: int = 8192
    """Maximum prompt tokens prefilled in one step. A longer prompt is prefilled alone."""
    max_model_len: int = 2048
    """Maximum tokens of a sequence, prompt included, if the model's `max_position_embeddings` is not
    smaller."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineOptions:
        """Read options from a mapping.

        Raises:
            ConfigError: if a name is unknown or a value is below 1.
        """
        names = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in names:
                raise ConfigError(f"the embedded engine has no option {name!r}{nearest(name, names)}")
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"engine option {name} is {value!r}; set an integer of at least 1")
        return cls(**options)
