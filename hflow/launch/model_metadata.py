"""What planning may know of a model without torch: its sizes and its precision.

Sizes come from the checkpoint's `config.json` where it exists, else from the configured architecture, else
from the model that this one starts from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hflow.config import ModelConfig, RunConfig
from hflow.errors import ConfigError, PlanError
from hflow.graph.ir import Graph
from hflow.graph.model import Model
from hflow.planner.backends import BACKENDS, traits
from hflow.planner.model_shape import ModelShape, read_shape

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "vocab_size",
)
"""Keys of an HF config that count something."""


def model_shape(config: RunConfig, graph: Graph, spec: Model) -> ModelShape | None:
    """The sizes of a model with the head that the recipe gives it; None where they cannot be known.

    Raises:
        ConfigError: for a `config.json` that cannot be read, sizes that cannot be, or a family that the
            model's backend does not build.
    """
    found = _architecture(config, graph, spec)
    if found is None:
        return None
    where, architecture = found
    _check_family(config, spec.name, where, architecture)
    try:
        shape = read_shape(architecture, spec.head)
        if shape is not None:
            _check_heads(shape)
    except PlanError as error:
        raise ConfigError(f"{where}: {error}") from error
    return shape


def model_dtype(config: RunConfig, graph: Graph, spec: Model) -> Literal["fp32", "bf16"]:
    """What a model computes in: as configured, else as the model that it starts from, else fp32."""
    own = config.models.get(spec.name, ModelConfig()).dtype
    if own is not None:
        return own
    return "fp32" if spec.init_from is None else model_dtype(config, graph, spec.init_from)


def overruled_architectures(config: RunConfig) -> tuple[str, ...]:
    """A warning for each model whose checkpoint has other sizes than its configured architecture."""
    warnings = []
    for name, model in config.models.items():
        file = _checkpoint_config(model)
        if file is None or model.architecture is None:
            continue
        held, named = _read(file), model.architecture
        both = (key for key in SIZES if held.get(key) and named.get(key))
        key = next((key for key in both if held[key] != named[key]), None)
        if key is not None:
            warnings.append(
                f"models.{name}: the plan is that of the checkpoint {model.path} ({key} {held[key]}), not of "
                f"the architecture ({key} {named[key]}); set models.{name}.path=null to plan the latter"
            )
    return tuple(warnings)


def _architecture(config: RunConfig, graph: Graph, spec: Model) -> tuple[str, Mapping[str, Any]] | None:
    """The HF config of a model, and where it stands."""
    own = config.models.get(spec.name, ModelConfig())
    file = _checkpoint_config(own)
    if file is not None:
        return str(file), _read(file)
    if own.architecture is not None:
        return f"models.{spec.name}", own.architecture
    return None if spec.init_from is None else _architecture(config, graph, spec.init_from)


def _checkpoint_config(model: ModelConfig) -> Path | None:
    file = None if model.path is None else Path(model.path) / "config.json"
    return file if file is not None and file.is_file() else None


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: this is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: it must be a mapping, as Hugging Face writes it")
    return values


def _check_heads(shape: ModelShape) -> None:
    """Refuse attention whose heads cannot be shared out, as the backends do."""
    heads, kv_heads, hidden = shape.num_heads, shape.num_kv_heads, shape.hidden
    if hidden % heads and shape.head_dim == hidden // heads:
        raise PlanError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; set "
            f"num_attention_heads to {_nearest_divisor(hidden, heads)}, or say head_dim"
        )
    if heads % kv_heads:
        raise PlanError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; set "
            f"num_key_value_heads to {_nearest_divisor(heads, kv_heads)}"
        )


def _check_family(config: RunConfig, name: str, where: str, architecture: Mapping[str, Any]) -> None:
    """Refuse a family that the backend does not build."""
    backend, family = config.models.get(name, ModelConfig()).backend, architecture.get("model_type")
    built = traits(backend).families
    if built is not None and isinstance(family, str) and family not in built:
        raise ConfigError(
            f"{where}: model_type {family!r} is not one that the {backend} backend builds "
            f"({', '.join(built)}); set models.{name}.backend={_backend_of_any_family()}"
        )


def _backend_of_any_family() -> str:
    return next(name for name in BACKENDS if traits(name).families is None)


def _nearest_divisor(number: int, wanted: int) -> int:
    return min((n for n in range(1, number + 1) if number % n == 0), key=lambda n: (abs(n - wanted), -n))
