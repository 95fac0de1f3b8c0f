"""Checks before a run starts that models, tokenizers and nodes fit together. Importing it takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hflow.base.errors import BackendError, ConfigError, DataError
from hflow.data.text.tokenizer import TextTokenizer
from hflow.graph.ir import NodeSpec
from hflow.graph.queries import is_library_node
from hflow.launch.planning.compile import Compiled
from hflow.launch.planning.models import missing_template
from hflow.models.hf_config import max_length, read_config, translate_errors
from hflow.models.hub import has_weights
from hflow.models.settings import SHARDS
from hflow.planner.checks.unrunnable import head_size_reason
from hflow.planner.models.descriptors import training_backend
from hflow.planner.plan.rows import Plan, Replica
from hflow.training.sharded_checkpoint import check_shards
from hflow.workers.interface import WorkerSetup
from hflow.workers.local_models import with_local_models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def check_models(compiled: Compiled, setup: WorkerSetup) -> None:
    """Check what would otherwise fail, or be truncated, at every sample.

    Raises:
        BackendError: for a model that cannot be built, or a checkpoint that does not match its config.
        DataError: for a tokenizer that does not exist.
        ConfigError: for a vocabulary, a `max_tokens` or a system message that does not fit its model, or if
            it lacks a chat template that a node needs.
    """
    is_here = {name: model.path is None or has_weights(model.path) for name, model in setup.models.items()}
    setup = with_local_models(setup, {name for name, is_whole in is_here.items() if is_whole})
    whole = {name: read_config(settings) for name, settings in setup.models.items()}
    configs = {name: config.get_text_config() for name, config in whole.items()}
    for name, settings in setup.models.items():
        if settings.resume:
            with translate_errors(name):
                check_shards(Path(f"{settings.path}/{SHARDS}"))
    for replica in compiled.plan.replicas:
        check = None if replica.role == "gen" else training_backend(replica.backend).check_model
        if check is not None and is_here[replica.model]:  # else the workers that fetch the weights check them
            check(setup.models[replica.model], whole[replica.model])
        _check_head_size(replica, compiled.plan, configs[replica.model])
    sources = [node.spec for node in compiled.graph.nodes if node.spec.opens_stream]
    for model in dict.fromkeys(model for source in sources for model in source.models):
        _check_vocabulary(model, setup, configs[model])
    for source in sources:
        if source.verb == "generate":
            _check_max_tokens(source, configs)
        if is_library_node(source, "chat_gen"):
            _check_chat_template(source, setup)


def _check_head_size(replica: Replica, plan: Plan, config: PreTrainedConfig) -> None:
    """Refuse heads that the replica's attention kernel cannot compute, of families that the planner lacks."""
    if replica.model in dict(plan.shapes):
        return
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if reason := head_size_reason(replica, plan, size):
        raise BackendError(reason)


def _check_chat_template(source: NodeSpec, setup: WorkerSetup) -> None:
    """Refuse conversations, or a system message, that the tokenizer of the node's model cannot encode."""
    model = source.models[0]
    template = TextTokenizer(setup.tokenizers[model]).chat_template
    if template is None:
        raise missing_template(source.name, model)
    system, user = source.knob_values["system"], {"role": "user", "content": ""}
    if system is None:
        return
    try:
        template.prompt([user])
    except DataError:
        return  # a template that rejects this tells nothing about the system message
    try:
        template.prompt([{"role": "system", "content": system}, user])
    except DataError as error:
        raise ConfigError(f"nodes.{source.name}.system: {error}") from error


def _check_vocabulary(model: str, setup: WorkerSetup, config: PreTrainedConfig) -> None:
    """Refuse a tokenizer with more tokens than its model."""
    num_tokens = TextTokenizer(setup.tokenizers[model]).num_tokens
    if num_tokens <= config.vocab_size:
        return
    fix = (
        f"Set models.{model}.architecture.vocab_size={num_tokens} or more."
        if setup.models[model].path is None
        else "Put the checkpoint's own tokenizer into its directory."
    )
    raise ConfigError(
        f"models.{model}: the tokenizer has {num_tokens} tokens, but the model's vocab_size is only "
        f"{config.vocab_size}. {fix}"
    )


def _check_max_tokens(source: NodeSpec, configs: Mapping[str, PreTrainedConfig]) -> None:
    """Refuse completions so long that no prompt fits in front of them."""
    max_tokens = source.option("max_tokens")
    for model in source.models:
        limit = max_length(configs[model])
        if limit is not None and max_tokens >= limit:
            raise ConfigError(
                f"nodes.{source.name}.max_tokens is {max_tokens}, but max_position_embeddings of {model} is "
                f"{limit}, for prompt and completion together. Set nodes.{source.name}.max_tokens="
                f"{limit - 1} or less."
            )
