"""Whether models, their tokenizers and the nodes that use them fit each other, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.backends.hf_config import max_length, read_config, refusals
from hflow.backends.interface import ModelSettings
from hflow.backends.megatron.checkpoint_reader import open_weights
from hflow.backends.megatron.model_dims import read_dims
from hflow.data.tokenizer import TextTokenizer
from hflow.errors import ConfigError
from hflow.graph.ir import NodeSpec
from hflow.launch.compile import Compiled
from hflow.workers.interface import WorkerSetup


def check_agreement(compiled: Compiled, setup: WorkerSetup) -> None:
    """Refuse what would fail, or be cut off, at every sample.

    Raises:
        BackendError: for a model that cannot be built, or a checkpoint that is not the model's.
        DataError: for a tokenizer that is not there.
        ConfigError: for numbers that do not fit each other, with those that do.
    """
    configs = {name: read_config(settings) for name, settings in setup.models.items()}
    for replica in compiled.plan.replicas:
        if replica.backend == "megatron":
            _check_megatron(setup.models[replica.model], configs[replica.model])
    sources = [node.spec for node in compiled.graph.nodes if node.spec.opens_stream]
    for model in dict.fromkeys(model for source in sources for model in source.models):
        _check_vocabulary(model, setup, configs[model])
    for source in sources:
        if source.verb == "generate":
            _check_max_tokens(source, setup, configs)


def _check_megatron(settings: ModelSettings, config: Any) -> None:
    """Read a checkpoint's table of tensors here: ranks would each find a fault of their own in it."""
    with refusals(settings.name):
        dims = read_dims(config, settings.head)
        if settings.path is not None:
            with open_weights(settings, dims):
                pass


def _check_vocabulary(model: str, setup: WorkerSetup, config: Any) -> None:
    num_tokens = TextTokenizer(setup.tokenizers[model]).num_tokens
    if num_tokens <= config.vocab_size:
        return
    remedy = (
        f"set models.{model}.architecture.vocab_size to {num_tokens} or more"
        if setup.models[model].path is None
        else "give the checkpoint its own tokenizer"
    )
    raise ConfigError(
        f"models.{model}: its tokenizer has {num_tokens} tokens, but the model's vocab_size is "
        f"{config.vocab_size}; {remedy}"
    )


def _check_max_tokens(source: NodeSpec, setup: WorkerSetup, configs: Mapping[str, Any]) -> None:
    """A completion as long as allowed must leave room for a prompt."""
    asked = source.option("max_tokens")
    for model in source.models:
        bounds = {
            f"models.{model}.gen.max_model_len": setup.engines[f"{model}@gen"]["max_model_len"],
            f"max_position_embeddings of {model}": max_length(configs[model]),
        }
        name, bound = min(((n, b) for n, b in bounds.items() if b is not None), key=lambda item: item[1])
        if asked >= bound:
            raise ConfigError(
                f"nodes.{source.name}.max_tokens is {asked}, but {name} is {bound}, prompt and completion "
                f"together; set max_tokens to {bound - 1} or less"
            )
