"""The configuration of a run: its schema, how it is composed and checked, and how it is written.

Imports neither torch nor ray. Hydra is imported at the first use of a name that composes: workers and the
planner need the schema alone.
"""

from typing import TYPE_CHECKING, Any

from hflow.config.schema import DataConfig, ModelConfig, RunConfig

if TYPE_CHECKING:
    from hflow.config.compose import ConfigLoader, flatten, load_config, to_mapping, to_yaml, validate_names

__all__ = [
    "ConfigLoader",
    "DataConfig",
    "ModelConfig",
    "RunConfig",
    "flatten",
    "load_config",
    "to_mapping",
    "to_yaml",
    "validate_names",
]


def __getattr__(name: str) -> Any:
    """Import the module that composes (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'hflow.config' has no attribute {name!r}")
    from hflow.config import compose

    return getattr(compose, name)
