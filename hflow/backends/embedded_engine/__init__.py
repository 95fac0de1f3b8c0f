"""A small generation engine over a Hugging Face decoder: KV cache and continuous batching."""

from hflow.backends.embedded_engine.engine import EmbeddedEngine
from hflow.backends.embedded_engine.options import EngineOptions

__all__ = ["EmbeddedEngine", "EngineOptions"]
