"""Checks before a run starts: that this version can run the plan, and that models fit their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from hflow.backends.hf_config import max_length, read_config
from hflow.data.tokenizer import TextTokenizer
from hflow.errors import ConfigError, NotYetError
from hflow.graph.ir import Level, Node, NodeSpec
from hflow.launch.compile import Compiled
from hflow.launch.model_metadata import model_dtype
from hflow.planner.backends import (
    BACKENDS,
    ENGINES,
    descriptor,
    factories,
    model_parallel_backend,
    training_backend,
    traits,
)
from hflow.planner.ir import Plan, Replica
from hflow.workers.interface import WorkerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def refuse_unrunnable(compiled: Compiled) -> None:
    """Refuse a plan that this version cannot run, before anything starts.

    Raises:
        NotYetError: naming the node or replica and what to set instead.
    """
    for reason in _reasons(compiled):
        raise NotYetError(reason)


def check_models(compiled: Compiled, setup: WorkerSetup) -> None:
    """Check what would otherwise fail, or be truncated, at every sample.

    Raises:
        BackendError: for a model that cannot be built, or a checkpoint that does not match its config.
        DataError: for a tokenizer that does not exist.
        ConfigError: for a vocabulary or a `max_tokens` that does not fit its model.
    """
    configs = {name: read_config(settings) for name, settings in setup.models.items()}
    for replica in compiled.plan.replicas:
        if replica.role != "gen" and (check := training_backend(replica.backend).check_model) is not None:
            check(setup.models[replica.model], configs[replica.model])
    sources = [node.spec for node in compiled.graph.nodes if node.spec.opens_stream]
    for model in dict.fromkeys(model for source in sources for model in source.models):
        _check_vocabulary(model, setup, configs[model])
    for source in sources:
        if source.verb == "generate":
            _check_max_tokens(source, setup, configs)


def _reasons(compiled: Compiled) -> Iterator[str]:
    """Yield why the plan cannot run."""
    yield from _shared_device_reasons(compiled.plan)
    for node in compiled.graph.nodes:
        if node.spec.runs_as_compute:
            yield from _custom_node_reasons(node.spec, f"{node.spec.name} ({node.spec.where})")
        if node.spec.verb == "update":
            yield from _update_reasons(node, compiled)
        if node.spec.verb == "generate":
            yield from _engine_reasons(node, compiled)
        if node.spec.verb == "generate" and compiled.graph.stream(node.stream).parent is not None:
            yield from _derived_stream_reasons(node, compiled)
    for replica in compiled.plan.replicas:
        yield from _backend_reasons(replica)
        yield from _layout_reasons(replica, compiled.config.workers)
    if compiled.plan.cluster.num_nodes > 1 and compiled.config.workers == "inproc":
        yield (
            "workers=inproc is one process and cannot use several machines. Set workers=ray, or a cluster of "
            "one machine."
        )


def _backend_reasons(replica: Replica) -> Iterator[str]:
    """Yield a reason where the backend has no implementation yet."""
    if descriptor(replica.backend).factory is None:
        names, key = (ENGINES, "gen.engine") if replica.role == "gen" else (BACKENDS, "backend")
        instead = next(name for name in names if name in factories())
        yield (
            f"{replica.name} uses {replica.backend}, which can be planned but not run yet. Set "
            f"models.{replica.model}.{key}={instead} to run it, or use `hflow plan`."
        )


def _layout_reasons(replica: Replica, workers: str) -> Iterator[str]:
    """Yield a reason where the backend cannot run the replica's layout."""
    layout = replica.layout
    if traits(replica.backend).is_model_parallel:
        if replica.role == "gen" or workers != "inproc" or layout.world == 1:
            return
        if training_backend(replica.backend).needs_process_per_rank:
            yield (
                f"{replica.name} has layout {layout}, for which {replica.backend} needs a process for each "
                f"rank. Set workers=ray, or models.{replica.model}.layout=d1."
            )
    elif layout.world > layout.data:
        setting = (
            f"gen.layout=d{layout.world}" if replica.role == "gen" else f"backend={model_parallel_backend()}"
        )
        yield (
            f"{replica.name} has layout {layout}, but {replica.backend} supports data parallelism only. Set "
            f"models.{replica.model}.{setting}."
        )


def _shared_device_reasons(plan: Plan) -> Iterator[str]:
    """Yield nodes that run as samples arrive on devices that other replicas use.

    Replicas take turns on shared devices, but such a node must be able to run at any time.
    """
    engines = {replica.group: replica.name for replica in plan.replicas if replica.role == "gen"}
    batch_nodes = {group: names[0] for group, names in plan.schedule.orders}
    for node in plan.schedule.nodes:
        if node.level is Level.BATCH or node.group is None:
            continue
        if (other := engines.get(node.group) or batch_nodes.get(node.group)) is not None:
            spec, (replica, *_) = plan.graph.node(node.name).spec, plan.placement(node.name).replicas
            model = plan.replica(replica).model
            yield (
                f"{node.name} ({spec.where}) runs as each {node.level} arrives, before a keep, so {replica} "
                f"cannot share devices with {other}. Give it devices of its own, as in "
                f"placement='... {model}=1'."
            )


def _engine_reasons(node: Node, compiled: Compiled) -> Iterator[str]:
    """Yield engines of a generate node that are on other workers, as an episode runs on one worker."""
    first, *others = (compiled.plan.replica(name) for name in compiled.plan.placement(node.name).replicas)
    for other in others:
        if other.heads != first.heads:
            yield (
                f"{node.spec.name} ({node.spec.where}) needs its engines on the same workers, but "
                f"{_layout_and_workers(first)}, and {_layout_and_workers(other)}. Give "
                f"models.{other.model}.gen the layout and group of models.{first.model}.gen."
            )


def _update_reasons(node: Node, compiled: Compiled) -> Iterator[str]:
    """Yield why two replicas of an update node differ, as an update works on equal shards of both."""
    where = f"{node.spec.name} ({node.spec.where})"
    target, source = (compiled.plan.replica(name) for name in compiled.plan.placement(node.name).replicas)
    if target.backend != source.backend:
        yield (
            f"{where} needs two replicas on the same backend, but {target.name} uses {target.backend} and "
            f"{source.name} uses {source.backend}, which shard weights differently. Set "
            f"models.{target.model}.backend={source.backend}."
        )
    for spec in (compiled.graph.model(replica.model) for replica in (target, source)):
        dtype = model_dtype(compiled.config, compiled.graph, spec)
        if dtype not in training_backend(target.backend).update_dtypes:
            instead = next(name for name in BACKENDS if dtype in training_backend(name).update_dtypes)
            yield (
                f"{where}: {target.backend} keeps the weights of {spec.name} in {dtype}, which is too coarse "
                f"for small updates. Set models.{spec.name}.dtype=fp32, or backend={instead} for both models."
            )
    if (target.layout, target.workers) != (source.layout, source.workers):
        yield (
            f"{where} needs two replicas with the same layout and workers, but "
            f"{_layout_and_workers(target)}, and {_layout_and_workers(source)}. Give "
            f"models.{target.model} the layout and group of models.{source.model}."
        )


def _derived_stream_reasons(node: Node, compiled: Compiled) -> Iterator[str]:
    """Yield what a generate node on a derived stream cannot do.

    It runs on the worker that has the sample it derives from, and only tokens of root streams have versions.
    """
    spec, where = node.spec, f"{node.spec.name} ({node.spec.where})"
    root = compiled.graph.root_stream(node.stream)
    if compiled.plan.placement(spec.name).replicas != compiled.plan.placement(root.source).replicas:
        yield f"{where} derives from stream {root.name!r}, so it can only use the engines of {root.source}."
    for other in compiled.graph.nodes:
        if other.spec.verb == "train" and other.stream in spec.streams:
            yield f"{where}: {other.name} trains on this derived stream, whose samples have no staleness yet."


def _custom_node_reasons(spec: NodeSpec, where: str) -> Iterator[str]:
    """Yield what a custom node type uses beyond what a compute node has."""
    node = f"{where} is a custom node type ({spec.verb!r}), which"
    if spec.opens_stream:
        yield f"{node} cannot open a stream yet. Use generate or encode."
    if spec.models:
        yield f"{node} cannot use the weights of models yet. Remove {spec.models[0]!r}."
    for name, provided in spec.provided:
        if provided not in ("sequences", "state"):
            yield f"{node} cannot have a parameter of type {provided!r} yet. Remove the parameter {name!r}."


def _layout_and_workers(replica: Replica) -> str:
    """Return `actor@gen is d2t1p1 on workers 0, 1`."""
    return f"{replica.name} is {replica.layout} on workers {', '.join(map(str, replica.workers))}"


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


def _check_max_tokens(source: NodeSpec, setup: WorkerSetup, configs: Mapping[str, PreTrainedConfig]) -> None:
    """Refuse completions so long that no prompt fits in front of them."""
    max_tokens = source.option("max_tokens")
    for model in source.models:
        limits = {
            f"models.{model}.gen.max_model_len": setup.engines[f"{model}@gen"]["max_model_len"],
            f"max_position_embeddings of {model}": max_length(configs[model]),
        }
        name, limit = min(((n, v) for n, v in limits.items() if v is not None), key=lambda item: item[1])
        if max_tokens >= limit:
            raise ConfigError(
                f"nodes.{source.name}.max_tokens is {max_tokens}, but {name} is {limit}, for prompt and "
                f"completion together. Set nodes.{source.name}.max_tokens={limit - 1} or less."
            )
