"""Checks that the settings of a request fit its graph and each other, and that each key is used by a node.

Errors name the nearest change that fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from hflow.base.errors import NotYetError, PlanError, nearest
from hflow.config.schema import GenConfig, ModelConfig, ScheduleConfig, WorkloadImages
from hflow.graph.ir import Graph
from hflow.graph.queries import (
    root_stream,
    root_streams,
    runs_outside_engines,
    trained_models,
    written_models,
)
from hflow.planner.forecast.cost.collectives import axis_lines
from hflow.planner.forecast.memory.rank import layer_matrices
from hflow.planner.models.choices import te_setting
from hflow.planner.plan.optimizers import OPTIMIZERS, check_groups, optimizer_traits
from hflow.planner.plan.request import PlanRequest, trained_shape
from hflow.planner.plan.rows import BatchCut, EdgeRule, Replica
from hflow.planner.plan.traits import first_with, traits
from hflow.shapes.architectures import ROUTERS
from hflow.shapes.model_shape import (
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    EXPERT_TARGETS,
    OUTPUT,
    A,
    B,
    ModelShape,
    kinds_of_layers,
    other_tensors,
    tensors,
)
from hflow.types.kernels import AUTO_KERNELS

MINIMUMS = {
    "batch": 1,
    "num_steps": 1,
    "save_every": 0,
}


def check_request(graph: Graph, request: PlanRequest) -> None:
    """Check settings that do not depend on where models run.

    Raises:
        PlanError: for a setting that is too small, or that a model's backend does not support.
    """
    for name, minimum in MINIMUMS.items():
        if getattr(request, name) < minimum:
            raise PlanError(f"{name} is {getattr(request, name)}; it must be at least {minimum}")
    _check_schedule(request.schedule, request.batch)
    _check_determinism(graph, request)
    for name, config in request.models.items():
        if config.sequence_parallel is not None and not traits(config.backend).is_model_parallel:
            raise PlanError(
                f"models.{name}.sequence_parallel is {str(config.sequence_parallel).lower()}, but the "
                f"{config.backend} backend has no tensor ranks that could share tokens; remove it, or set "
                f"models.{name}.backend={first_with('is_model_parallel')}"
            )
        if config.kernels != AUTO_KERNELS and not traits(config.backend).chooses_kernels:
            raise PlanError(
                f"models.{name}.kernels is {config.kernels}, but the {config.backend} backend computes with "
                f"the modules of transformers; remove it, or set "
                f"models.{name}.backend={first_with('chooses_kernels')}"
            )
        _check_fp8(name, config)
        shape = request.shapes.get(name)
        if config.sequence_parallel is False and shape is not None and shape.experts is not None:
            raise PlanError(
                f"models.{name}.sequence_parallel is false, but each tensor rank of a model with experts "
                "sends its own tokens to them, which is sequence parallelism; remove it"
            )
        _check_lora(graph, name, request)
        _check_base(graph, name, request)
        _check_balance(graph, name, request)
        if name in trained_models(graph):
            _check_optimizer(name, request)
            _check_host_steps(name, config)
        _check_offload(graph, name, config)
        _check_compile(name, config)
    for stream in root_streams(graph):
        max_concurrent = request.schedule.max_concurrent
        if stream.group > max_concurrent:
            raise PlanError(
                f"schedule.max_concurrent is {max_concurrent}, but a group of {stream.name!r} has "
                f"{stream.group} samples; set schedule.max_concurrent to {stream.group} or more"
            )


def _check_optimizer(name: str, request: PlanRequest) -> None:
    """Raise if groups of weights, or the optimizer, are for weights that the model has not."""
    config, shape = request.model(name), request.trained_shape(name)
    if shape is None:
        return
    trained = [spec.name for spec in tensors(shape) if config.freeze is None or spec.location != "tower"]
    check_groups(f"models.{name}.optim", config.optim, trained)
    if optimizer_traits(config.optim.name).needs_whole_matrix and not layer_matrices(shape):
        raise PlanError(
            f"models.{name}.optim.name is {config.optim.name}, which is for matrices of layers, but none of "
            f"{name} is trained; set models.{name}.optim.name={OPTIMIZERS.default}"
        )


def _check_balance(graph: Graph, name: str, request: PlanRequest) -> None:
    """Raise if the balance of experts has no effect, or cannot be computed."""
    config, shape, family = request.model(name), request.shapes.get(name), request.families.get(name)
    balance, key = config.balance, f"models.{name}.balance"
    if balance is None:
        return
    if name not in trained_models(graph):
        raise PlanError(f"{key} is set, but no node trains {name}; remove it")
    if not balance.coefficient and not balance.bias_rate:
        raise PlanError(f"{key} has neither a loss nor a bias; set {key}.coefficient or {key}.bias_rate")
    if balance.over is not None and not balance.coefficient:
        raise PlanError(f"{key}.over is {balance.over}, but {key}.coefficient is 0; set it, or remove over")
    if config.compile:
        raise PlanError(
            f"{key} is set, but compiled layers do not balance experts; set models.{name}.compile=false"
        )
    if shape is not None and shape.experts is None:
        raise PlanError(f"{key} is set, but {name} has no experts (family {shape.family}); remove it")
    router = ROUTERS.get(family or "")
    if family is not None and router is None:
        raise PlanError(
            f"{key} is set, but experts are balanced in models of family {', '.join(ROUTERS)}, not {family}; "
            "remove it"
        )
    if balance.bias_rate and router is not None and not router.has_bias:
        biased = ", ".join(name for name, router in ROUTERS.items() if router.has_bias)
        raise PlanError(
            f"{key}.bias_rate is {balance.bias_rate:g}, but routers of family {family} have no bias, unlike "
            f"those of {biased}; set {key}.coefficient in its place"
        )
    if balance.bias_rate and config.lora is not None:
        raise PlanError(
            f"{key}.bias_rate is {balance.bias_rate:g}, but only adapters are trained, saved and sent; set "
            f"{key}.coefficient in its place"
        )


def _check_host_steps(name: str, config: ModelConfig) -> None:
    """Raise if the states of an optimizer that steps on the host are to be offloaded, and nothing else is.

    A backend that does not shard weights also keeps gradients, and fp32 weights, between steps.
    """
    is_on_host, key = optimizer_traits(config.optim.name).is_on_host, f"models.{name}"
    if is_on_host and config.offload == "optimizer" and traits(config.backend).shards_weights:
        raise PlanError(
            f"{key}.offload is optimizer, but {config.optim.name} has its states in host memory already; "
            f"remove {key}.offload"
        )


def _check_fp8(name: str, config: ModelConfig) -> None:
    """Raise if the backend, or the kernels, do not multiply in FP8."""
    if config.fp8 is None:
        return
    key = f"models.{name}"
    if not traits(config.backend).chooses_kernels:
        raise PlanError(
            f"{key}.fp8 is {config.fp8}, but the {config.backend} backend does not multiply in FP8; set "
            f"{key}.backend={first_with('chooses_kernels')}, or remove {key}.fp8"
        )
    if config.kernels == "torch":
        raise PlanError(
            f"{key}.fp8 is {config.fp8}, but {key}.kernels is {config.kernels}, and only Transformer Engine "
            f"multiplies in FP8; remove one of them"
        )


def _check_compile(name: str, config: ModelConfig) -> None:
    """Raise if the backend cannot compile."""
    if config.compile and not traits(config.backend).compiles_layers:
        raise PlanError(
            f"models.{name}.compile compiles layers of the {first_with('compiles_layers')} backend, but "
            f"models.{name}.backend is {config.backend}; remove one of them"
        )


def _check_offload(graph: Graph, name: str, config: ModelConfig) -> None:
    """Raise if there is nothing that could be offloaded."""
    offload, key = config.offload, f"models.{name}.offload_activations"
    if config.offload_activations and not config.activation_checkpointing:
        raise PlanError(
            f"{key} keeps the inputs of recomputed layers, but layers are not recomputed; set "
            f"models.{name}.activation_checkpointing=true"
        )
    if offload == "optimizer" and name not in trained_models(graph):
        raise PlanError(
            f"models.{name}.offload is optimizer, but no node trains {name}; set it to all, which offloads "
            "the weights, or to none"
        )


def _check_lora(graph: Graph, name: str, request: PlanRequest) -> None:
    """Raise if a model cannot have the adapters that are configured for it."""
    config, shape, key = request.model(name), request.shapes.get(name), f"models.{name}.lora"
    if config.lora is None:
        return
    if config.freeze is not None:
        raise PlanError(
            f"models.{name}.freeze={config.freeze} has no effect, as only the adapters of {key} are trained; "
            "remove it"
        )
    if not traits(config.backend).has_adapters:
        raise PlanError(
            f"{key} is set, but the {config.backend} backend cannot train adapters; set "
            f"models.{name}.backend={first_with('has_adapters')}, or remove {key}"
        )
    _check_lora_options(name, config, shape)
    if config.kernels == "transformer_engine" or config.fp8 is not None:
        asked, instead = te_setting(name, config)
        raise PlanError(
            f"{asked}, but adapters are added to the products of torch; set {instead}, or remove {key}"
        )
    for node in graph.nodes:
        if node.spec.verb == "update" and name in node.spec.reads_weights:
            raise PlanError(
                f"{key} is set, but {node.name} works on all weights of {name}, of which only adapters are "
                f"trained; remove {key}, or the node"
            )
    if shape is None:
        return
    try:
        trained = trained_shape(shape, config.lora)
    except PlanError as error:
        raise PlanError(f"models.{name}.{error}") from None
    specs = [spec for kind in (*kinds_of_layers(trained), other_tensors(trained)) for spec in kind]
    sides = {A: -1, EMBEDDING_A: -1, B: -2, EMBEDDING_B: -2}
    sizes = {x.shape[axis]: x for x in specs for end, axis in sides.items() if x.name.endswith(end)}
    if not sizes:
        raise PlanError(f"{key}.targets is empty, so nothing is trained; set {key}.targets=[all-linear]")
    if config.lora.r > min(sizes):
        module = sizes[min(sizes)].name.partition(".lora_")[0].split(".")[-1]
        raise PlanError(
            f"{key}.r is {config.lora.r}, but {module} has only {min(sizes)} rows or columns; set "
            f"{key}.r={min(sizes)} or less"
        )


def _check_base(graph: Graph, name: str, request: PlanRequest) -> None:
    """Raise if a model cannot use the weights of the model that its `base_of` names."""
    config, key = request.model(name), f"models.{name}.base_of"
    if config.base_of is None:
        return
    models, owner = {model.name: model for model in graph.models}, request.model(config.base_of)
    asked, of_owner = f"{key} is {config.base_of}", f"models.{config.base_of}"
    if config.base_of not in models:
        known = ", ".join(models)
        raise PlanError(
            f"{asked}, which the recipe does not have{nearest(config.base_of, models)} (known: {known})"
        )
    if owner.base_of is not None:
        raise PlanError(
            f"{asked}, which uses the weights of {owner.base_of} itself; name a model with weights of its own"
        )
    trained, written = trained_models(graph), written_models(graph)
    if config.lora is not None and owner.lora is not None and owner.lora.base is not None:
        raise PlanError(
            f"{asked}, whose weights are in 4 bits, beside which one model's adapters are trained; remove "
            f"{of_owner}.lora.base or {key}"
        )
    if owner.lora is None or config.base_of not in trained:
        raise PlanError(
            f"{asked}, whose weights are not those of a model with adapters; set {of_owner}.lora, or remove "
            f"{key}"
        )
    if name in written and (config.lora is None or name not in trained):
        raise PlanError(
            f"{asked}, but all weights of {name} are trained; set models.{name}.lora, or remove {key}"
        )
    for one in ("path", "architecture"):
        own, theirs = getattr(config, one), getattr(owner, one)
        if own is not None and own != theirs:
            raise PlanError(
                f"{asked}, but models.{name}.{one} says that {name} has other weights than {of_owner}.{one}; "
                f"remove one of them"
            )
    if config.path is None and config.architecture is not None and owner.path is not None:
        raise PlanError(f"{asked}, which has weights of {owner.path}; remove models.{name}.architecture")
    for one in ("backend", "compute_dtype"):
        own, theirs = getattr(config, one), getattr(owner, one)
        if own != theirs:
            setting = one.removeprefix("compute_")
            raise PlanError(
                f"{asked}, whose {setting} is {theirs}, but that of {name} is {own}; set "
                f"models.{name}.{setting}={theirs}"
            )
    head, of_base = models[name].head, models[config.base_of].head
    if head != of_base and (config.lora is None or head == "lm"):
        raise PlanError(
            f"{asked}, which has the head {of_base!r}, but {name} has the head {head!r}; remove {key}"
        )
    if config.offload == "all":
        raise PlanError(
            f"models.{name}.offload is all, but its weights are those of {config.base_of}; set it to none or "
            f"optimizer, or set {of_owner}.offload=all"
        )


def _check_lora_options(name: str, config: ModelConfig, shape: ModelShape | None) -> None:
    """Raise if the backend cannot have adapters of a kind, or two options exclude each other."""
    lora, key = config.lora, f"models.{name}.lora"
    assert lora is not None
    others = (EMBEDDING, OUTPUT, *EXPERT_TARGETS)
    other = next((target for target in others if target in lora.targets), None)
    if lora.dora and other is not None:
        raise PlanError(
            f"{key}.dora is set, but {other} has no magnitudes; remove it from {key}.targets, or set "
            f"{key}.dora=false"
        )
    if lora.base is not None and not traits(config.backend).rounds_base:
        raise PlanError(
            f"{key}.base is {lora.base}, but the {config.backend} backend cannot train that; set "
            f"models.{name}.backend={first_with('rounds_base')}, or remove it"
        )
    of_experts = next((target for target in EXPERT_TARGETS if target in lora.targets), None)
    if config.compile and (lora.base is not None or of_experts is not None):
        option = f"targets has {of_experts}" if lora.base is None else f"base is {lora.base}"
        raise PlanError(f"{key}.{option}, whose products are not compiled; set models.{name}.compile=false")
    if lora.base is not None and shape is not None and (shape.experts or shape.vision):
        part = "experts" if shape.experts else "towers"
        raise PlanError(f"{key}.base is {lora.base}, but models with {part} are not rounded yet; remove it")


def _check_schedule(settings: ScheduleConfig, batch: int) -> None:
    """Raise for rules under which no batch could ever form, and for those that no sample meets."""
    if settings.drop_older_than is not None and not settings.age_rule:
        raise PlanError(
            f"schedule.drop_older_than is {settings.drop_older_than}, but schedule.age_rule is off; "
            "remove one of them"
        )
    min_age = settings.sync_every - 1
    if settings.drop_older_than is not None and settings.drop_older_than < min_age:
        raise PlanError(
            f"schedule.drop_older_than is {settings.drop_older_than}, but weights reach the engines only "
            f"every {settings.sync_every} steps; set schedule.drop_older_than to {min_age} or more"
        )
    if settings.queue is not None and settings.queue < batch:
        raise PlanError(
            f"schedule.queue is {settings.queue}, but a batch has {batch} groups; set schedule.queue to "
            f"{batch} or more"
        )
    if settings.max_staleness:
        return
    is_long = settings.queue is None or settings.queue >= settings.sync_every * batch
    for name in ("age_rule", "drop_older_than", *(("queue",) if is_long else ())):
        if getattr(settings, name) != getattr(ScheduleConfig(), name):
            reason = "schedule.max_staleness=0 trains all samples before the engines get new weights"
            raise PlanError(_unused_line(f"schedule.{name}", ScheduleConfig(), reason))


def check_streams(graph: Graph) -> None:
    """Check that exactly one stream, the trained one, determines the steps of a recipe that learns.

    Raises:
        PlanError: if no stream is trained, or a node changes a model with the batches of another stream.
        NotYetError: if several streams are trained.
    """
    trained = [stream for stream in root_streams(graph) if stream.trained]
    if not trained and graph.learns:
        raise PlanError(
            f"recipe {graph.name!r} has no stream fed by {graph.dataset!r}; add a generate or encode node"
        )
    if len(trained) > 1:
        names = " and ".join(repr(stream.name) for stream in trained)
        raise NotYetError(
            f"{names} are both fed by {graph.dataset!r}, but only one trained stream is supported yet; feed "
            "the others from other datasets"
        )
    for node in graph.nodes:
        root = root_stream(graph, node)
        if node.spec.writes_weights and not root.trained:
            raise PlanError(
                f"node {node.name!r} changes {node.spec.writes_weights[0]!r} on stream {root.name!r}, which "
                f"is not trained; move it to stream {trained[0].name!r}"
            )


def check_splits(
    rules: Iterable[EdgeRule], cuts: Mapping[str, BatchCut], batch: int, group_size: int
) -> None:
    """Check that a batch has work for every dp rank of every node.

    Raises:
        PlanError: for a batch that is too small, naming the smallest one that fits.
    """
    for rule in rules:
        cut = cuts.get(rule.consumer)
        minibatches = cut.minibatches if cut else 1
        if batch < minibatches:
            raise PlanError(
                f"{rule.consumer}: a batch of {batch} groups cannot be cut into {minibatches} minibatches; "
                f"set batch to {minibatches} or more, or minibatches to {batch} or less"
            )
        dp, units_per_group = len(rule.heads), 1 if rule.by_group else group_size
        num_units = batch // minibatches * units_per_group
        if rule.policy == "balanced" and rule.fields and num_units < dp:
            min_batch = -(-dp // units_per_group) * minibatches
            what = "groups" if rule.by_group else "samples"
            raise PlanError(
                f"{rule.consumer}: a minibatch of {num_units} {what} cannot be split over {dp} dp ranks; set "
                f"batch to {min_batch} or more, or use a layout of at most d{num_units}"
            )


def _check_determinism(graph: Graph, request: PlanRequest) -> None:
    """Refuse batches that depend on how long things take, where two runs must be equal."""
    is_generated = any(
        graph.node(stream.source).spec.verb == "generate" for stream in root_streams(graph) if stream.trained
    )
    for key, synchronous in (("max_staleness", 0), ("sync_every", 1)):
        value = getattr(request.schedule, key)
        if request.deterministic and is_generated and value != synchronous:
            raise PlanError(
                f"deterministic is true, but with schedule.{key}={value:g} timing decides which samples "
                f"form a batch; set schedule.{key}={synchronous}, or deterministic=false"
            )


def plan_warnings(
    replicas: Iterable[Replica], group_sizes: Mapping[str, int], request: PlanRequest
) -> list[str]:
    """Return warnings about settings that are allowed, but probably not intended."""
    warnings, cluster = [], request.cluster
    for name, config in request.models.items():
        settings: tuple[tuple[str, bool, str, str], ...] = (
            ("offload", config.offload != "none", config.offload, "none"),
            ("offload_activations", config.offload_activations, "true", "false"),
        )
        for key, is_set, value, off in settings:
            if is_set and cluster.device == "cpu":
                warnings.append(
                    f"models.{name}.{key}={value} saves no memory on a CPU, as the host's memory is the "
                    f"device's; set models.{name}.{key}={off}, unless this is a test"
                )
    for replica in replicas:
        size = sum(group_sizes[name] for name in replica.groups)
        idle = size - replica.layout.world
        if idle:
            names = " and ".join(map(repr, replica.groups))
            warnings.append(
                f"{replica.name} uses {replica.layout.world} of the {size} devices of group "
                f"{names}; the other {idle} are idle during its turn"
            )
        ranks = axis_lines(replica.layout, replica.role, replica.workers, "tensor")
        machines = max((len({cluster.node_of(worker) for worker in line}) for line in ranks), default=1)
        if machines > 1:
            warnings.append(
                f"{replica.name}: tensor ranks of {replica.layout} are on {machines} machines, and every "
                f"layer waits for the network; use at most t{cluster.devices_per_node}, within one machine"
            )
    return warnings


_OF_TRAINING = (
    "lora",
    "optim",
    "freeze",
    "activation_checkpointing",
    "offload_activations",
    "zero_stage",
)
_OF_SAVING = ("save_optimizer",)
_OF_FORWARD_PASSES = (
    "backend",
    "layout",
    "tokens_per_microbatch",
    "kernels",
    "fp8",
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
    _check_schedule_keys(graph, request.schedule)
    if request.workload.images != WorkloadImages() and not any(model.vision for model in graph.models):
        raise PlanError("workload.images is set, but no model of the recipe sees; remove it")
    masks = {node.spec.option("mask") for node in graph.nodes if node.spec.verb == "infer"}
    for mask in sorted(request.workload.shares.keys() - masks):
        raise PlanError(f"workload.shares.{mask} is set, but no infer node has mask={mask!r}; remove it")
    for name, config in request.models.items():
        if (unused := _find_unused_key(graph, name, config)) is not None:
            raise PlanError(unused)


def _check_schedule_keys(graph: Graph, settings: ScheduleConfig) -> None:
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
    """Return a line that refuses a key; `defaults` has its default in the attribute of its last name."""
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
    if not graph.model(model).vision:
        yield ("images", "freeze"), f"the recipe declares {model} without vision=True"
    if model not in written_models(graph):
        yield _OF_SAVING, f"no node changes {model}"
    if not runs_outside_engines(graph, model) and not _generates(graph, model):
        yield ("base_of",), f"no node uses {model}"
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
