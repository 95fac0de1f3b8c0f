"""The configuration of a run: its schema, how it is composed and checked, and how it is written.

Imports neither torch nor ray.
"""

from hflow.config.compose import ConfigLoader, flatten, load_config, to_mapping, to_yaml, validate_names
from hflow.config.schema import DataConfig, ModelConfig, RunConfig

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
