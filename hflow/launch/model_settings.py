"""Turns configuration into the settings from which workers build models and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hflow.backends.settings import SHARDS, SHARDS_INDEX, ModelSettings
from hflow.config import ModelConfig, RunConfig
from hflow.data.tokenizer import TokenizerSettings, eos_ids
from hflow.errors import ConfigError
from hflow.graph.model import Model
from hflow.json_text import read_json_object
from hflow.launch.compile import Compiled
from hflow.launch.model_metadata import check_is_whole, model_dtype, source_model
from hflow.model_config import max_positions
from hflow.planner.graph_queries import scheduled_updates
from hflow.shipped import shipped_recipes
from hflow.types.layer_kernels import LayerKernels
from hflow.user_files import resolved


def model_settings(compiled: Compiled) -> dict[str, ModelSettings]:
    """Return the settings of every model of the recipe.

    Raises:
        ConfigError: if a model has neither weights nor an architecture.
    """
    return {spec.name: _model_settings(compiled, spec) for spec in compiled.graph.models}


def tokenizer_settings(compiled: Compiled) -> dict[str, TokenizerSettings]:
    """Return the settings of every model's tokenizer."""
    sources = {spec.name: source_config(compiled, spec) for spec in compiled.graph.models}
    own = {name: compiled.config.models.get(name, ModelConfig()).chat_template for name in sources}
    return {
        name: TokenizerSettings(
            source.path,
            source.alphabet,
            own[name] or source.chat_template,
            _architecture_eos(name, source),
            max_positions(source.architecture or {} if source.path is None else _saved_config(source.path)),
        )
        for name, source in sources.items()
    }


def _saved_config(path: str) -> Mapping[str, Any]:
    return read_json_object(Path(path) / "config.json")


def _architecture_eos(name: str, source: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-text tokens of a configured architecture. It is not used if there is a checkpoint."""
    if source.path is not None or source.architecture is None:
        return ()
    return eos_ids(source.architecture, f"models.{name}.architecture")


def source_config(compiled: Compiled, spec: Model) -> ModelConfig:
    """Return the configuration that a model's weights come from: its own, or that of its `init_from`.

    Raises:
        ConfigError: if there is none, or its checkpoint does not exist.
    """
    spec = source_model(compiled.config, spec)
    config = compiled.config.models.get(spec.name, ModelConfig())
    if config.path is None and config.architecture is None:
        raise ConfigError(
            f"models.{spec.name} has no weights; set models.{spec.name}.path to a checkpoint directory, "
            f"or choose an architecture with model@models.{spec.name}=tiny-qwen2"
        )
    check_is_whole(spec.name, config)
    if config.path is not None and not (Path(config.path) / "config.json").is_file():
        raise ConfigError(
            f"models.{spec.name}.path is {config.path}, which has no checkpoint (config.json); "
            f"{_training_hint(config.path)}set another path"
        )
    return config


def _training_hint(path: str) -> str:
    """Return how to train the checkpoint that is missing at a path, if it is of a run of a shipped recipe."""
    out, name, *_ = (*Path(path).parts, "", "")
    is_shipped = out == RunConfig.out and name in shipped_recipes()
    return f"train it with `hflow run {name}`, or " if is_shipped else ""


def _model_settings(compiled: Compiled, spec: Model) -> ModelSettings:
    config = compiled.config.models.get(spec.name, ModelConfig())
    source = source_config(compiled, spec)
    if config.lora is not None and source.path is None:
        raise ConfigError(
            f"models.{spec.name}.lora adapts the weights of a checkpoint, but {spec.name} starts from random "
            f"ones; set models.{spec.name}.path, or remove models.{spec.name}.lora"
        )
    is_resumed = _is_resumed(spec, config, _followers(compiled, spec))
    num_earlier = _saved_updates(Path(str(config.path)) / SHARDS) if is_resumed else 0
    return ModelSettings(
        name=spec.name,
        head=spec.head,
        trainable=spec.trainable,
        path=None if source.path is None else str(resolved(source.path)),
        architecture=None if source.path is not None else dict(source.architecture or {}),
        seed=compiled.config.seed,
        dtype=model_dtype(compiled.config, spec, compiled.plan.cluster.device),
        device=compiled.plan.cluster.device,
        activation_checkpointing=config.activation_checkpointing,
        offload_activations=config.offload_activations,
        compile=config.compile,
        offload=config.offload,
        sequence_parallel=config.sequence_parallel,
        kernels=_kernels(compiled, spec),
        tokens_per_microbatch=config.tokens_per_microbatch,
        lora=config.lora,
        optim=config.optim,
        num_updates=num_earlier + scheduled_updates(compiled.plan, compiled.config.steps).get(spec.name, 0),
        save_optimizer=config.save_optimizer,
        resume=is_resumed,
    )


def _kernels(compiled: Compiled, spec: Model) -> LayerKernels:
    """Return the kernels that the plan chose for the layers of a model; torch's if there is no choice."""
    plan = compiled.plan
    chosen = (c.kernels for c in plan.layers if plan.replica(c.replica).model == spec.name)
    return next(chosen, LayerKernels.TORCH)


def _followers(compiled: Compiled, spec: Model) -> list[str]:
    """Return the models that start from a model's weights, because nothing else is configured for them."""
    names = []
    for other in compiled.graph.models:
        config = compiled.config.models.get(other.name, ModelConfig())
        if other.init_from == spec and config.path is None and config.architecture is None:
            names.append(other.name)
    return names


def _is_resumed(spec: Model, config: ModelConfig, followers: Sequence[str]) -> bool:
    """Return whether a model starts with the optimizer state in its checkpoint.

    Args:
        spec: the model.
        config: its configuration.
        followers: models that start from its weights.

    Only weights and optimizer state are restored, not the position in the data, samples or the ledger.

    Raises:
        ConfigError: if there is no such state, the model is not trained, or another model would start from
            weights that it did not have.
    """
    if not config.resume:
        return False
    key = f"models.{spec.name}"
    if not spec.trainable:
        raise ConfigError(
            f"{key}.resume is for trained models, but {spec.name} is frozen; remove {key}.resume"
        )
    if config.lora is not None:
        raise ConfigError(
            f"{key}.resume takes all weights of a checkpoint, but of {spec.name} only adapters are trained; "
            f"continue the whole run with hflow run --resume RUN, or remove {key}.lora"
        )
    if config.path is None:
        raise ConfigError(f"{key}.resume needs a checkpoint; set {key}.path")
    for other in followers:
        raise ConfigError(
            f"models.{other} starts from the weights of {spec.name}, which {key}.resume takes from a later "
            f"checkpoint; set models.{other}.path to the weights that it had, or continue the whole run with "
            "hflow run --resume RUN"
        )
    if not (Path(config.path) / SHARDS).is_dir():
        raise ConfigError(
            f"{key}.path is {config.path}, which has no optimizer state ({SHARDS}/); set {key}.resume=false "
            f"to load only its weights, or use a checkpoint saved with {key}.save_optimizer=true"
        )
    return True


def _saved_updates(shards: Path) -> int:
    """Return the number of optimizer steps that a sharded checkpoint was saved after.

    Raises:
        ConfigError: if its index is damaged.
    """
    index = shards / SHARDS_INDEX
    num_steps = read_json_object(index, "sharded checkpoint").get("num_steps")
    if type(num_steps) is not int:
        raise ConfigError(f"{index}: num_steps is {num_steps!r}, not a number; use another checkpoint")
    return num_steps
