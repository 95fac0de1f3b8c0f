"""What a user may set on the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hflow.errors import ConfigError, nearest


@dataclass(frozen=True)
class EngineOptions:
    """Bounds of one engine. They change speed and memory, not what is drawn."""

    max_running: int = 256
    """Sequences that draw a token in one step; the others wait."""
    max_tokens_per_step: int = 8192
    """Prompt tokens prefilled in one step (a longer prompt is prefilled alone)."""
    max_model_len: int = 2048
    """Longest sequence, prompt included, where the model's `max_position_embeddings` is not less."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> EngineOptions:
        """Read options from a mapping.

        Raises:
            ConfigError: for an unknown name or a number below 1.
        """
        names = [field.name for field in fields(cls)]
        for name, value in options.items():
            if name not in names:
                raise ConfigError(f"the embedded engine has no option {name!r}{nearest(name, names)}")
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"engine option {name} is {value!r}, set a whole number of at least 1")
        return cls(**options)
