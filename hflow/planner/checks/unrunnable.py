"""`unrunnable_reasons`: why a plan cannot run, found while it is made.

A reason depends on the plan alone. What depends on the machine, such as missing packages, is checked when a
run starts (`hflow/launch/running/preflight.py`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from hflow.base.devices import is_gpu
from hflow.config.schema import ONE_PROCESS
from hflow.graph.ir import Level, Node, NodeSpec
from hflow.graph.queries import root_stream
from hflow.planner.models.choices import layer_reasons, served_model
from hflow.planner.models.descriptors import engine_kind, training_backend
from hflow.planner.plan.cluster import device_of
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import Plan, Replica
from hflow.planner.plan.traits import BACKENDS, ENGINES, Trait, first_with, traits
from hflow.planner.weights.weight_routes import transport_reasons
from hflow.shapes.architectures import LLAMA_LIKE_FAMILIES, ROUTERS, UNSUPPORTED
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape
from hflow.types.kernels import head_size_problem
from hflow.types.recorded import RecordedKind, requested_kinds
from hflow.types.sampling_mask import SAMPLING_MASK, SAMPLING_REPLAY, truncates


def unrunnable_reasons(plan: Plan, request: PlanRequest, *, chosen: Container[str] = ()) -> tuple[str, ...]:
    """Return the reasons why a plan cannot run. Each names the node or replica, and what to set instead.

    Args:
        chosen: replicas whose layout the planner has chosen, so that the user cannot change it.
    """
    return tuple(_reasons(plan, request, chosen))


def _reasons(plan: Plan, request: PlanRequest, chosen: Container[str]) -> Iterator[str]:
    workers = request.settings.get("workers")
    yield from _shared_device_reasons(plan)
    for node in plan.graph.nodes:
        if node.spec.verb == "update":
            yield from _update_reasons(node, plan, request)
        if node.spec.verb == "generate":
            yield from _engine_reasons(node, plan)
            yield from _truncation_reasons(node, plan)
            yield from _length_reasons(node.spec, request)
            yield from _recorded_reasons(node, plan)
            yield from _routing_replay_reasons(node, plan, request)
        if node.spec.verb == "generate" and plan.graph.stream(node.stream).parent is not None:
            yield from _derived_stream_reasons(node, plan)
    yield from _family_reasons(plan, request)
    yield from _head_size_reasons(plan)
    yield from layer_reasons(plan, request)
    for replica in plan.replicas:
        shape = request.shapes.get(replica.model)
        yield from layout_reasons(replica, workers, shape, is_chosen=replica.name in chosen)
        if replica.role == "gen":
            yield from _precision_reasons(replica, request)
        if replica.role == "gen" and runs_family(replica.backend, shape):
            kind = engine_kind(replica.backend)
            yield from kind.objections(served_model(replica, request))
    yield from transport_reasons(plan, request)
    yield from _base_reasons(plan, request)
    yield from _offload_reasons(plan, request)
    if plan.cluster.num_nodes > 1 and workers in ONE_PROCESS:
        yield (
            "workers=inproc is one process and cannot use several machines. Set workers=ray, or a cluster of "
            "one machine."
        )
    elif is_gpu(plan.cluster.device) and plan.cluster.num_devices > 1 and workers in ONE_PROCESS:
        yield (
            f"workers=inproc is one process, which uses one GPU. Set workers=ray, or cluster="
            f"{device_of(plan.cluster.name)}-1x1."
        )
    elif is_gpu(plan.cluster.device) and plan.deterministic and workers in ONE_PROCESS:
        yield (
            "deterministic=true needs environment variables that are set before a process uses CUDA, which "
            "workers=inproc does not do. Set workers=ray."
        )


def _precision_reasons(replica: Replica, request: PlanRequest) -> Iterator[str]:
    """Yield a reason where an engine does not round weights, or its KV cache, as configured."""
    key = f"models.{replica.model}.gen"
    for name, asked in request.model(replica.model).gen.precisions.items():
        if (name, asked) not in traits(replica.backend).precisions:
            others = [other for other in ENGINES if (name, asked) in traits(other).precisions]
            yield (
                f"{key}.{name} is {asked}, but the engine {replica.backend} uses the model's dtype only. Set "
                f"{key}.engine={' or '.join(others)}, or {key}.{name}=null."
            )


def builds(backend: str, family: str) -> bool:
    """Return whether a backend or an engine runs models of a family that the planner knows."""
    families = traits(backend).families
    return family not in UNSUPPORTED if families is None else family in families


def runs_family(backend: str, shape: ModelShape | None) -> bool:
    """Return whether a backend or an engine runs models of a family; of unknown sizes, each says itself."""
    return shape is None or builds(backend, shape.family)


def _family_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield the models of families that nothing builds, or that their backend or engine does not build."""
    shapes, known = dict(plan.shapes), ", ".join(LLAMA_LIKE_FAMILIES)
    families = {replica.model: request.families.get(replica.model) or "" for replica in plan.replicas}
    nowhere = {model: family for model, family in families.items() if family in UNSUPPORTED}
    for model, family in nowhere.items():
        yield (
            f"models.{model} is of family {family}, which {UNSUPPORTED[family]}, so that it can be planned "
            f"but not run. Use a model of another family, such as {known}."
        )
    for replica in plan.replicas:
        model, name = replica.model, replica.backend
        if model not in nowhere and not runs_family(name, shapes.get(model)):
            key, names = ("gen.engine", ENGINES) if replica.role == "gen" else ("backend", BACKENDS)
            other = f"models.{model}.{key}={first_with('has_all_families', names)}"
            yield (
                f"models.{model} is of family {shapes[model].family}, which {name} does not run. Set {other} "
                f"or use a model of family {known}."
            )


def _head_size_reasons(plan: Plan) -> Iterator[str]:
    """Yield the models with attention heads of a size that the planned kernel does not compute."""
    shapes = dict(plan.shapes)
    known = [replica for replica in plan.replicas if replica.model in shapes]
    reasons = [head_size_reason(r, plan, shapes[r.model].head_dim) for r in known]
    yield from (f"{reason}." for reason in dict.fromkeys(reasons) if reason)


def head_size_reason(replica: Replica, plan: Plan, head_size: int) -> str | None:
    """Return the reason why a replica's attention kernel cannot compute its heads; None if it can."""
    if replica.role == "gen" and traits(replica.backend).has_own_attention:
        return None
    kernel = next(choice.kernel for choice in plan.attention if choice.replica == replica.name)
    problem, model = head_size_problem(kernel, head_size), replica.model
    return problem and f"{model} {problem}. Set models.{model}.dtype=fp32, or use another architecture"


def layout_reasons(
    replica: Replica, workers: str | None, shape: ModelShape | None, *, is_chosen: bool = False
) -> Iterator[str]:
    """Yield a reason where the backend cannot run a replica's layout.

    Args:
        shape: the sizes of its model. Expert ranks are no reason for families that can only be planned.
        is_chosen: whether the planner has chosen the layout, which it does if no other one fits.
    """
    layout, has = replica.layout, f"{replica.name} has layout {replica.layout}, but {replica.backend}"
    own = traits(replica.backend)

    def or_backend_with(trait: Trait) -> str:
        if replica.role == "gen":
            return ""
        return _or_set(f"models.{replica.model}.backend={first_with(trait)}", is_chosen)

    if layout.context > 1 and not own.has_context_axis:
        rank, backend = (
            f"c{layout.context}",
            f"models.{replica.model}.backend={first_with('has_context_axis')}",
        )
        yield f"{has} has no context ranks. {_without(rank, is_chosen)}{_or_set(backend, is_chosen)}."
    if layout.expert > 1 and not own.has_expert_axis and runs_family(replica.backend, shape):
        without = _without(f"e{layout.expert}", is_chosen)
        yield f"{has} does not divide experts. {without}{or_backend_with('has_expert_axis')}."
    if layout.replicate > 1 and not own.shards_weights:
        without = _without(f"r{layout.replicate}", is_chosen)
        yield f"{has} does not shard weights over data ranks. {without}{or_backend_with('shards_weights')}."
    if own.is_model_parallel:
        if layout.pipe > 1 and not own.has_pipeline_axis:
            instead = Layout(layout.data, layout.tensor * layout.pipe)
            setting = f"Set models.{replica.model}.gen.layout={instead}"
            remedy = _without(f"p{layout.pipe}", is_chosen) if is_chosen else setting
            yield f"{has} has no pipeline stages. {remedy}."
        if replica.role == "gen" or workers not in ONE_PROCESS or layout.world == 1:
            return
        if training_backend(replica.backend).needs_process_per_rank:
            yield (
                f"{replica.name} has layout {layout}, for which {replica.backend} needs a process for each "
                f"rank. Set workers=ray, or models.{replica.model}.layout=d1."
            )
    elif layout.world > layout.num_copies:
        other = f"backend={first_with('is_model_parallel')}"
        setting = f"gen.layout=d{layout.world}" if replica.role == "gen" else other
        yield f"{has} supports data parallelism only. Set models.{replica.model}.{setting}."


def _without(axis: str, is_chosen: bool) -> str:
    return f"No layout without {axis} fits into memory" if is_chosen else f"Remove {axis} from the layout"


def _or_set(setting: str, is_chosen: bool) -> str:
    return f". Set {setting}" if is_chosen else f", or set {setting}"


def _shared_device_reasons(plan: Plan) -> Iterator[str]:
    """Yield nodes that run as samples arrive on devices that other replicas use.

    Replicas take turns on shared devices, but such a node must be able to run at any time.
    """
    engines = {group: r.name for r in plan.replicas if r.role == "gen" for group in r.groups}
    batch_nodes = {group: names[0] for group, names in plan.schedule.orders}
    for node in plan.schedule.nodes:
        if node.level is Level.BATCH:
            continue
        others = (engines.get(group) or batch_nodes.get(group) for group in node.groups)
        if (other := next(filter(None, others), None)) is not None:
            spec, (replica, *_) = plan.graph.node(node.name).spec, plan.placement(node.name).replicas
            model = plan.replica(replica).model
            yield (
                f"{node.name} ({spec.where}) runs as each {node.level} arrives, before a keep, so {replica} "
                f"cannot share devices with {other}. Give it devices of its own, as in "
                f"placement='... {model}=1'."
            )


def _engine_reasons(node: Node, plan: Plan) -> Iterator[str]:
    """Yield engines of a generate node that are on other workers, as an episode runs on one worker."""
    first, *others = (plan.replica(name) for name in plan.placement(node.name).replicas)
    for other in others:
        if other.heads != first.heads:
            yield (
                f"{node.spec.name} ({node.spec.where}) needs its engines on the same workers, but "
                f"{_layout_and_workers(first)}, and {_layout_and_workers(other)}. Give "
                f"models.{other.model}.gen the layout and group of models.{first.model}.gen."
            )


def _truncation_reasons(node: Node, plan: Plan) -> Iterator[str]:
    """Yield a reason where log-probs over a part of the vocabulary are compared with those over all of it."""
    options, stream = dict(node.spec.options), root_stream(plan.graph, node)
    if not stream.trained or not truncates(options):
        return
    for reader in plan.graph.nodes:
        fields = {read.field for read in reader.reads}
        computes = reader.spec.verb in ("train", "infer") or not options.get(SAMPLING_REPLAY)
        is_compared = "behav_logprobs" in fields and SAMPLING_MASK not in fields and computes
        if is_compared and root_stream(plan.graph, reader) == stream:
            name = node.spec.name
            yield (
                f"{name} ({node.spec.where}) samples from a part of the vocabulary. Its log-probs are over "
                f"that part, and {reader.name} would compare them with log-probs over all of it. Set "
                f"nodes.{name}.top_p=1.0 nodes.{name}.top_k=0 nodes.{name}.min_p=0.0"
                f"{_or_replay(node, reader)}."
            )
            return


def _or_replay(node: Node, reader: Node) -> str:
    """Return the other fix: to compute log-probs over the same part, where the samples are those drawn."""
    can = len(node.spec.models) == 1 and reader.stream in node.spec.streams
    return f", or nodes.{node.name}.{SAMPLING_REPLAY}=true" if can else ""


def _recorded_reasons(node: Node, plan: Plan) -> Iterator[str]:
    """Yield what a generate node asks for beside tokens that cannot be recorded."""
    for kind in requested_kinds(dict(node.spec.options)):
        (model,), key = node.spec.models, f"nodes.{node.name}.{kind.option}"
        what, shape = kind.name.replace("_", " "), dict(plan.shapes).get(model)
        if shape is None:
            yield (
                f"{key} is set, but the planner does not know the {what} of {model}. Set models.{model}.path "
                f"or models.{model}.architecture, or remove {key}."
            )
        elif kind.row_format(shape, dict(node.spec.options)) is None:
            yield f"{key} is set, but {model} has no {what} (family {shape.family}). Remove {key}."
        engines = dict.fromkeys(r.backend for r in plan.replicas if r.role == "gen" and r.model == model)
        for engine in engines:
            if kind.name not in traits(engine).records:
                yield f"{key} is set, but the engine {engine} does not record {what}. Remove {key}."
            elif _needs_top_k(kind, engine) and not node.spec.option("top_k", 0):
                yield (
                    f"{node.name} ({node.spec.where}) samples without top_k, but the engine {engine} records "
                    f"at most top_k of the tokens that sampling leaves. Set nodes.{node.name}.top_k too, "
                    f"such as 100, or models.{model}.gen.engine=embedded."
                )


def _needs_top_k(kind: RecordedKind, engine: str) -> bool:
    return kind.name == SAMPLING_MASK and traits(engine).records_up_to_top_k


def _routing_replay_reasons(node: Node, plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield reasons why the experts of a generate node's tokens cannot be replayed."""
    if not node.spec.option("routing_replay", False):
        return
    (model,), key = node.spec.models, f"nodes.{node.name}.routing_replay"
    shape = dict(plan.shapes).get(model)
    replayed = [family for family, router in ROUTERS.items() if router.replays]
    if shape is not None and shape.experts is not None and shape.family not in replayed:
        families = ", ".join(replayed)
        yield (
            f"{key} is set, but experts are replayed in models of family {families}, not {shape.family}. "
            f"Remove {key}."
        )
    if request.model(model).compile:
        yield f"{key} is set, but compiled layers do not replay experts. Set models.{model}.compile=false."


def _length_reasons(spec: NodeSpec, request: PlanRequest) -> Iterator[str]:
    """Yield models whose sequences are too short for a completion with any prompt."""
    max_tokens = spec.option("max_tokens")
    for model in spec.models:
        limit = request.model(model).gen.max_model_len
        if max_tokens is not None and max_tokens >= limit:
            yield (
                f"nodes.{spec.name}.max_tokens is {max_tokens}, but models.{model}.gen.max_model_len is "
                f"{limit}, for prompt and completion together. Set nodes.{spec.name}.max_tokens={limit - 1} "
                "or less."
            )


def _update_reasons(node: Node, plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield differences between an update node's two replicas, as an update works on equal shards of both."""
    where = f"{node.spec.name} ({node.spec.where})"
    target, source = (plan.replica(name) for name in plan.placement(node.name).replicas)
    if target.backend != source.backend:
        yield (
            f"{where} needs two replicas on the same backend, but {target.name} uses {target.backend} and "
            f"{source.name} uses {source.backend}, which shard weights differently. Set "
            f"models.{target.model}.backend={source.backend}."
        )
    for model in (target.model, source.model):
        dtype = request.model(model).compute_dtype
        if dtype not in training_backend(target.backend).update_dtypes:
            instead = next(name for name in BACKENDS if dtype in training_backend(name).update_dtypes)
            yield (
                f"{where}: {target.backend} keeps the weights of {model} in {dtype}, which is too coarse "
                f"for small updates. Set models.{model}.dtype=fp32, or backend={instead} for both models."
            )
    if (target.layout, target.workers) != (source.layout, source.workers):
        yield (
            f"{where} needs two replicas with the same layout and workers, but "
            f"{_layout_and_workers(target)}, and {_layout_and_workers(source)}. Give "
            f"models.{target.model} the layout and group of models.{source.model}."
        )


def _base_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield models that cannot use the weights of another one, as these are divided in another way.

    An engine may have weights of its own, if another replica of its model has not.
    """
    using = {replica.model for replica in plan.replicas if replica.base_of}
    for replica in plan.replicas:
        if replica.role == "gen" and replica.base_of:
            names = replica.model, plan.replica(replica.base_of).model
            own, theirs = (request.model(name).gen.cuda_graphs for name in names)
            if own != theirs:
                both = " and ".join(f"models.{name}.gen.cuda_graphs" for name in names)
                yield f"{both} differ, but their models are in one engine. Set both to the same value."
        base = request.model(replica.model).base_of
        if base is None or replica.base_of or (replica.role == "gen" and replica.model in using):
            continue
        asked = f"models.{replica.model}.base_of is {base}, but"
        alike = [r for r in plan.replicas if r.model == base and (r.role == "gen") == (replica.role == "gen")]
        if not alike:
            yield f"{asked} {base} has no engine that {replica.name} could use. Remove base_of."
        for owner in alike:
            gen, rest = (".gen", "engine") if replica.role == "gen" else ("", "kernels")
            yield (
                f"{asked} {_layout_and_workers(replica)}, and {_layout_and_workers(owner)}. Give "
                f"models.{replica.model}{gen} the layout, group and {rest} of models.{base}{gen}."
            )


def _offload_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield models whose weights cannot be offloaded, as others use them in place."""
    for replica in plan.replicas:
        if replica.role == "gen" or request.model(replica.model).offload == "none":
            continue
        key = f"models.{replica.model}.offload"
        if replica.base_of and not replica.adapter_parameters:
            yield (
                f"{key} has no effect, as {replica.name} uses the weights of {replica.base_of} without their "
                f"adapters. Set {key}=none, or models.{plan.replica(replica.base_of).model}.offload=all."
            )
        for route in plan.weights:
            is_in_place = route.how == "shared" and replica.dtype == "fp32"
            users = (route.src, plan.replica(route.src).base_of)
            if replica.name in users and is_in_place and request.model(replica.model).offload == "all":
                instead = "optimizer" if replica.role == "train" else "none"
                yield (f"{key}=all offloads weights that {route.dst} uses in place. Set {key}={instead}.")


def _derived_stream_reasons(node: Node, plan: Plan) -> Iterator[str]:
    """Yield the limits that a generate node on a derived stream exceeds.

    It runs on the worker that has the sample it derives from, and only tokens of root streams have versions.
    """
    spec, where = node.spec, f"{node.spec.name} ({node.spec.where})"
    root = plan.graph.root_stream(node.stream)
    if plan.placement(spec.name).replicas != plan.placement(root.source).replicas:
        yield f"{where} derives from stream {root.name!r}, so it can only use the engines of {root.source}."
    for other in plan.graph.nodes:
        if other.spec.verb == "train" and other.stream in spec.streams:
            yield f"{where}: {other.name} trains on this derived stream, whose samples have no staleness yet."


def _layout_and_workers(replica: Replica) -> str:
    """Return `actor@gen is d2t1p1 on workers 0, 1`."""
    return f"{replica.name} is {replica.layout} on workers {', '.join(map(str, replica.workers))}"
