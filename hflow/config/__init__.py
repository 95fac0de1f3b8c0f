"""The configuration of a run: schema, composition by Hydra, checks. Imports neither torch nor ray."""

from hflow.config.compose import load_config
from hflow.config.dump import flatten, to_mapping, to_yaml
from hflow.config.names import validate_names
from hflow.config.schema import DataConfig, GenConfig, ModelConfig, OptimConfig, RunConfig

__all__ = [
    "DataConfig",
    "GenConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "flatten",
    "load_config",
    "to_mapping",
    "to_yaml",
    "validate_names",
]
