"""From configuration to the settings that build models and tokenizers."""

from __future__ import annotations

from pathlib import Path

from hflow.backends.interface import SHARDS, ModelSettings
from hflow.config import ModelConfig
from hflow.data.tokenizer import TokenizerSettings
from hflow.errors import ConfigError
from hflow.graph.model import Model
from hflow.launch.compile import Compiled
from hflow.launch.model_metadata import model_dtype
from hflow.launch.plan_request import num_firings


def model_settings(compiled: Compiled) -> dict[str, ModelSettings]:
    """Settings of every model of the recipe.

    Raises:
        ConfigError: when a model has neither weights nor an architecture.
    """
    return {spec.name: _settings(compiled, spec) for spec in compiled.graph.models}


def tokenizer_settings(compiled: Compiled) -> dict[str, TokenizerSettings]:
    """Where each model's tokenizer comes from."""
    found = {}
    for spec in compiled.graph.models:
        config = source_config(compiled, spec)
        found[spec.name] = TokenizerSettings(config.path, config.alphabet, config.chat_template)
    return found


def source_config(compiled: Compiled, spec: Model) -> ModelConfig:
    """The configuration that says where a model's weights come from: its own, else `init_from`'s.

    Raises:
        ConfigError: when there is none, or its checkpoint is not there.
    """
    config = compiled.config.models.get(spec.name, ModelConfig())
    if config.path is None and config.architecture is None:
        if spec.init_from is None:
            raise ConfigError(
                f"models.{spec.name} has no weights; set models.{spec.name}.path to a checkpoint's directory "
                f"or take an architecture with +model@models.{spec.name}=tiny-qwen2"
            )
        return source_config(compiled, spec.init_from)
    if config.path is not None and not (Path(config.path) / "config.json").is_file():
        raise ConfigError(
            f"models.{spec.name}.path is {config.path}, but there is no checkpoint (config.json) in it; "
            "train one with `hflow run recipes/sft.py`, or name another directory"
        )
    return config


def _settings(compiled: Compiled, spec: Model) -> ModelSettings:
    own = compiled.config.models.get(spec.name, ModelConfig())
    source = source_config(compiled, spec)
    return ModelSettings(
        name=spec.name,
        head=spec.head,
        trainable=spec.trainable,
        path=None if source.path is None else str(Path(source.path).resolve()),
        architecture=None if source.path is not None else dict(source.architecture or {}),
        seed=compiled.config.seed,
        dtype=model_dtype(compiled.config, compiled.graph, spec),
        device=compiled.plan.cluster.device,
        activation_checkpointing=own.activation_checkpointing,
        sequence_parallel=own.sequence_parallel,
        tokens_per_microbatch=own.tokens_per_microbatch,
        optim=own.optim,
        num_updates=_num_updates(compiled, spec.name),
        save_optimizer=own.save_optimizer,
        resume=_resumes(spec, own),
    )


def _resumes(spec: Model, own: ModelConfig) -> bool:
    """Whether a model goes on from the optimizer's state that its checkpoint holds.

    Only the model goes on: place in the data, samples and the ledger of the run are a resumed run's matter.

    Raises:
        ConfigError: when there is no such state, or no use for it.
    """
    if not own.resume:
        return False
    key = f"models.{spec.name}"
    if not spec.trainable:
        raise ConfigError(
            f"{key}.resume is for models that are trained, and {spec.name} is frozen; leave it out"
        )
    if own.path is None:
        raise ConfigError(f"{key}.resume needs a checkpoint to go on from; set {key}.path")
    if not (Path(own.path) / SHARDS).is_dir():
        raise ConfigError(
            f"{key}.path is {own.path}, which has no {SHARDS}/ with an optimizer's state; set "
            f"{key}.resume=false to start from its weights alone, or name a checkpoint saved with "
            f"{key}.save_optimizer=true"
        )
    return True


def _num_updates(compiled: Compiled, model: str) -> int:
    """Optimizer steps of a model in the whole run."""
    cuts = dict(compiled.plan.cuts)
    updates = 0
    for node in compiled.graph.nodes:
        if model in node.spec.writes_weights and node.name in cuts:
            cut, spec = cuts[node.name], node.spec
            updates += num_firings(spec, compiled.config.steps) * cut.minibatches * cut.epochs
    return updates
