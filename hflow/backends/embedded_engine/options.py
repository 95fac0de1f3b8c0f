"""What a user may set on the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hflow.errors import ConfigError


@dataclass(frozen=True)
class EngineOptions:
    """Bounds of one engine. They change speed and memory, never what is generated."""

    max_running: int = 256
    """Sequences that draw a token in one step; the others wait."""
    max_tokens_per_step: int = 8192
    """Prompt tokens prefilled in one step (a longer prompt is prefilled alone)."""
    max_model_len: int = 0
    """Longest sequence, prompt included; 0 takes the model's `max_position_embeddings`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            low = 0 if field.name == "max_model_len" else 1
            if getattr(self, field.name) < low:
                raise ConfigError(f"engine option {field.name} is {getattr(self, field.name)}, set at least {low}")
