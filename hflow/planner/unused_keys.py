"""Keys of a configuration that no node of a graph uses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hflow.config.schema import GenConfig, ModelConfig, ScheduleConfig
from hflow.errors import PlanError
from hflow.graph.ir import Graph
from hflow.planner.graph_queries import root_streams, runs_outside_engines, trained_models, written_models
from hflow.planner.request import PlanRequest

_OF_TRAINING = ("lora", "optim", "activation_checkpointing", "offload_activations")
_OF_SAVING = ("save_optimizer",)
_OF_FORWARD_PASSES = (
    "backend",
    "layout",
    "tokens_per_microbatch",
    "kernels",
    "sequence_parallel",
    "compile",
    "offload",
)
_OF_TRAINED_GENERATION = ("max_staleness", "sync_every", "age_rule", "drop_older_than", "queue")
_DESCRIBES_MODEL = ("max_model_len",)
"""Keys of `gen` that hold for a model of this size, whether it generates or not."""


def check_unused_keys(graph: Graph, request: PlanRequest) -> None:
    """Check that whatever is configured is used.

    Raises:
        PlanError: for the first key of a model or the schedule that is set and that no node uses.
    """
    _check_schedule(graph, request.schedule)
    for name, config in request.models.items():
        if (unused := _find_unused_key(graph, name, config)) is not None:
            raise PlanError(unused)


def _check_schedule(graph: Graph, settings: ScheduleConfig) -> None:
    """Raise for rules of generation, if the samples that are trained are not generated."""
    default, verbs = ScheduleConfig(), {node.spec.verb for node in graph.nodes}
    is_generated = any(
        graph.node(stream.source).spec.verb == "generate" for stream in root_streams(graph) if stream.trained
    )
    unused = () if is_generated else _OF_TRAINED_GENERATION
    unused = unused if "generate" in verbs else (*unused, "interrupt")
    for name in unused:
        if getattr(settings, name) != getattr(default, name):
            reason = "no node generates the samples that are trained"
            raise PlanError(_unused_line(f"schedule.{name}", default, reason))


def _find_unused_key(graph: Graph, model: str, config: ModelConfig) -> str | None:
    """Return a line about the first key that is set but not used; None if there is none."""
    gen = () if _generates(graph, model) else _first_difference(_generation(config.gen), GenConfig())
    if gen:
        return _unused_line(f"models.{model}.gen.{gen[0]}", GenConfig(), f"no node generates with {model}")
    for keys, reason in _unused(graph, model):
        for key in keys:
            own, default = getattr(config, key), getattr(ModelConfig(), key)
            if own == default:
                continue
            if inner := _first_difference(own, default):
                return _unused_line(f"models.{model}.{key}.{inner[0]}", default, reason)
            return _unused_line(f"models.{model}.{key}", ModelConfig(), reason)
    return None


def _unused_line(key: str, defaults: Any, reason: str) -> str:
    """Return a line that refuses a key.

    Args:
        key: the whole key.
        defaults: an object whose attribute of the key's last name is its default.
        reason: why nothing uses it.
    """
    default = json.dumps(getattr(defaults, key.rpartition(".")[2]))
    return f"{key} is set, but {reason}; remove it, or set it to its default, {default}"


def without_unused_keys(graph: Graph, model: str, config: ModelConfig) -> ModelConfig:
    """Return a configuration with the defaults of the keys that are not used."""
    default = ModelConfig()
    unused = {key: getattr(default, key) for keys, _ in _unused(graph, model) for key in keys}
    if not _generates(graph, model):
        unused["gen"] = GenConfig(**{key: getattr(config.gen, key) for key in _DESCRIBES_MODEL})
    return replace(config, **unused)


def _unused(graph: Graph, model: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield keys that no node uses, and why."""
    if model not in trained_models(graph):
        yield _OF_TRAINING, f"no node trains {model}"
    if model not in written_models(graph):
        yield _OF_SAVING, f"no node changes {model}"
    if not runs_outside_engines(graph, model):
        yield _OF_FORWARD_PASSES, f"no node trains {model} or infers with it"


def _generates(graph: Graph, model: str) -> bool:
    return any(node.spec.opens_stream and model in node.spec.reads_weights for node in graph.nodes)


def _generation(gen: GenConfig) -> GenConfig:
    """Return the configuration without the keys that describe a model."""
    return replace(gen, **{key: getattr(GenConfig(), key) for key in _DESCRIBES_MODEL})


def _first_difference(own: Any, default: Any) -> tuple[str, ...]:
    """Return the first key in which two groups of keys differ; nothing for other values."""
    if not is_dataclass(own) or not is_dataclass(default):
        return ()
    names = (field.name for field in fields(own))
    return tuple(name for name in names if getattr(own, name) != getattr(default, name))[:1]
