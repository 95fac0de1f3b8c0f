"""The engine and kernels of a replica where nothing is configured, and the meaning of `deterministic=true`.

Two runs of a deterministic plan with the same versions are equal bit for bit, as far as libraries allow.
Workers also turn on torch's deterministic algorithms (`hflow.workers.torch_determinism`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hflow.base.devices import is_gpu
from hflow.config.schema import ModelConfig
from hflow.planner.models.descriptors import EngineKind, ServedModel, Variation, descriptor, engine_kind
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import AttentionChoice, EngineChoice, LayerChoice, Plan, Replica
from hflow.planner.plan.traits import ENGINES, is_engine, traits
from hflow.shapes.model_shape import ModelShape, torch_only
from hflow.types.kernels import (
    AUTO_KERNELS,
    FP8_NEEDS,
    Fp8Needs,
    Fp8Recipe,
    LayerKernels,
    choose_kernels,
    packed_kernel,
    unsupported,
)

UNDECIDED = ""
"""The backend of a generation replica whose engine is not chosen yet."""


def choose_engines(
    replicas: Iterable[Replica], request: PlanRequest
) -> tuple[tuple[Replica, ...], tuple[EngineChoice, ...]]:
    """Give every generation replica its engine.

    The configuration decides, then the plan file that is executed again. Otherwise it is the first engine
    that prefers the cluster's devices, is installed and can serve the model, else the default engine. Return
    the replicas with their engines, and the reasons in the same order. Undecided replicas have the backend
    `UNDECIDED`.
    """
    chosen, choices = [], []
    for replica in replicas:
        if replica.role == "gen":
            choice = _engine_choice(replica, request)
            replica = replace(replica, backend=choice.engine)
            served, kind = served_model(replica, request), engine_kind(choice.engine)
            remarks = [choice.why, kind.remark(served)]
            if not served.config.gen.cuda_graphs:
                remarks.append("without CUDA graphs")
            if served.config.lora is not None:
                merging = kind.find_merging(served)
                replica = replace(replica, merges_adapters=merging is not None)
                remarks.append(f"adapters {f'merged: {merging}' if merging else 'beside its weights'}")
            choices.append(replace(choice, why="; ".join(filter(None, remarks))))
        chosen.append(replica)
    return tuple(chosen), tuple(choices)


def served_model(replica: Replica, request: PlanRequest) -> ServedModel:
    """Return the model that a replica's engine has to serve."""
    name = replica.model
    return ServedModel(
        replica,
        request.model(name),
        request.cluster,
        request.hardware.at(replica.workers[0]),
        request.shapes.get(name),
        request.families.get(name),
    )


def _engine_choice(replica: Replica, request: PlanRequest) -> EngineChoice:
    if replica.backend != UNDECIDED:
        return EngineChoice(replica.name, replica.backend, "as configured")
    if replica.model in request.engines:
        return EngineChoice(replica.name, request.engines[replica.model], "as in the plan file")
    device = request.cluster.device
    preferred = [kind for kind in map(engine_kind, ENGINES) if device in kind.preferred_on]
    objections = {kind.name: _objection(kind, replica, request) for kind in preferred}
    for name, objection in objections.items():
        if objection is None:
            return EngineChoice(replica.name, name, f"installed, {device.upper()}")
    why = next((objection for objection in objections.values() if objection), f"the cluster is {device}")
    return EngineChoice(replica.name, ENGINES.default, why)


def _objection(kind: EngineKind, replica: Replica, request: PlanRequest) -> str | None:
    """Return the reasons why an engine cannot be a replica's default."""
    return next(_objections(kind, replica, request), None)


def _objections(kind: EngineKind, replica: Replica, request: PlanRequest) -> Iterator[str]:
    if kind.name in request.engine_problems:
        yield request.engine_problems[kind.name]
    yield from kind.objections(served_model(replace(replica, backend=kind.name), request))


def attention_choices(replicas: Iterable[Replica], request: PlanRequest) -> tuple[AttentionChoice, ...]:
    """Return the kernel of each replica with the reason for it, as the packages of this machine allow."""
    return tuple(attention_choice(replica, request) for replica in replicas)


def attention_choice(replica: Replica, request: PlanRequest) -> AttentionChoice:
    """Return the kernel of a replica with the reason for it."""
    if is_engine(replica.backend) and traits(replica.backend).has_own_attention:
        return AttentionChoice(replica.name, f"that of {replica.backend}", "the engine chooses it")
    shape = request.shapes.get(replica.model)
    kernel = packed_kernel(
        request.cluster.device,
        request.model(replica.model).compute_dtype,
        request.hardware.at(replica.workers[0]).device.capability,
        request.flash_attn,
        deterministic=request.deterministic,
        has_sinks=shape is not None and shape.has_sinks,
    )
    return AttentionChoice(replica.name, str(kernel), kernel.why)


def layer_choices(replicas: Iterable[Replica], request: PlanRequest) -> tuple[LayerChoice, ...]:
    """Return the kernels of each replica with the reason for them, as the packages of this machine allow."""
    return tuple(
        layer_choice(replica, request) for replica in replicas if traits(replica.backend).chooses_kernels
    )


def layer_choice(replica: Replica, request: PlanRequest) -> LayerChoice:
    """Return the kernels of a replica whose backend chooses them, with the reason."""
    config, installed = request.model(replica.model), request.transformer_engine
    if config.lora is not None or replica.base_of:
        return LayerChoice(replica.name, LayerKernels.TORCH, None, "adapters are beside matrices of torch")
    is_open = config.kernels == AUTO_KERNELS and config.fp8 is None
    if is_open and (part := torch_only(request.shapes.get(replica.model))):
        return LayerChoice(replica.name, LayerKernels.TORCH, None, f"torch computes {part}")
    device, dtype = request.cluster.device, config.compute_dtype
    kernels, why = choose_kernels(config.kernels, device, dtype, installed, config.fp8)
    if config.fp8 is not None and "fp8" not in request.hardware.at(replica.workers[0]).calibration.matmul:
        why += ", whose rate is a guess"
    of_te = installed if kernels is LayerKernels.TRANSFORMER_ENGINE else None
    return LayerChoice(replica.name, kernels, of_te.version if of_te else None, why)


def layer_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield models that Transformer Engine is to compute and does not. Packages are checked by a run."""
    of_te = (c.replica for c in plan.layers if c.kernels is LayerKernels.TRANSFORMER_ENGINE)
    for replica in map(plan.replica, of_te):
        config = request.model(replica.model)
        problem = unsupported(plan.cluster.device, config.compute_dtype)
        if part := torch_only(request.shapes.get(replica.model)):
            problem = f"torch computes {part}"
        if config.fp8 is not None and not problem:
            problem = _fp8_problem(Fp8Recipe(config.fp8), replica, request)
        if problem:
            asked, instead = te_setting(replica.model, config)
            yield f"{asked}, but {problem}. Set {instead}."


def te_setting(model: str, config: ModelConfig) -> tuple[str, str]:
    """Return the text `key is value` that asks for Transformer Engine, and the setting without it."""
    key = f"models.{model}"
    if config.fp8 is not None:
        return f"{key}.fp8 is {config.fp8}", f"{key}.fp8=null"
    kernels = f"{key}.kernels"
    return f"{kernels} is {LayerKernels.TRANSFORMER_ENGINE}", f"{kernels}={LayerKernels.TORCH}"


def _fp8_problem(recipe: Fp8Recipe, replica: Replica, request: PlanRequest) -> str:
    """Return the reason why a replica does not multiply in FP8; empty if it does."""
    needs, device = FP8_NEEDS[recipe], request.hardware.at(replica.workers[0]).device
    if device.capability is not None and not needs.fits(device.capability):
        able = [other for other, of_other in FP8_NEEDS.items() if of_other.fits(device.capability)]
        recipes = " and ".join(able) if able else "no recipe"
        found = ".".join(map(str, device.capability))
        return f"{device.name} has compute capability {found}, which computes {recipes}"
    shape, tensor = request.shapes.get(replica.model), replica.layout.tensor
    if shape is None:
        return ""
    if shape.num_kv_heads < tensor:
        return (
            f"{replica.layout} has more tensor ranks than {replica.model} key-value heads "
            f"({shape.num_kv_heads}), whose copies are projected in {replica.dtype}"
        )
    for name, size, multiple in _product_sizes(shape, tensor, needs):
        if size % multiple:
            ranks = f" of a rank of {replica.layout}" if tensor > 1 else ""
            return f"{name}{ranks}, {size}, is not a multiple of {multiple}"
    return ""


def _product_sizes(shape: ModelShape, tensor: int, needs: Fp8Needs) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the size on a rank, and the multiple, of rows and columns of the layers' matrices."""
    yield "the hidden size", shape.hidden, needs.row_multiple
    heads, keys = (num // tensor * shape.head_dim for num in (shape.num_heads, shape.num_kv_heads))
    yield "the size of its queries", heads, needs.multiple
    yield "the size of its queries, keys and values", heads + 2 * keys, needs.multiple
    if any(not shape.has_experts(layer) for layer in range(shape.num_layers)):
        yield "the intermediate size", shape.intermediate // tensor, needs.multiple
    if shape.experts is not None:
        yield "the intermediate size of an expert", shape.experts.intermediate // tensor, needs.multiple


CUDA_VARIABLES = {
    # cuBLAS otherwise chooses between workspaces, and with them the order of sums. Read when CUDA starts.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL otherwise chooses for each collective by size and ranks, and among others sums inside of switches.
    # Each collective has a ring, and every device can use the simple protocol.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""Environment variables of every worker on CUDA."""


def deterministic_variables(plan: Plan, worker: int) -> dict[str, str]:
    """Return the environment variables that one worker needs so that runs are equal; none on CPUs."""
    if not plan.deterministic or not is_gpu(plan.cluster.device):
        return {}
    variables = dict(CUDA_VARIABLES)
    for replica in plan.replicas:
        if worker in replica.workers:
            variables |= descriptor(replica.backend).deterministic_variables
    return variables


def determinism_warnings(replicas: Iterable[Replica], request: PlanRequest) -> Iterator[str]:
    """Yield the replicas whose results may differ between two runs although they should not."""
    if request.deterministic:
        for replica, variation in _variations(replicas, request.cluster):
            yield (
                f"deterministic=true does not cover {replica.name}: {variation.reason}. Set "
                f"models.{replica.model}.{variation.setting}."
            )


def _variations(replicas: Iterable[Replica], cluster: ClusterSpec) -> Iterator[tuple[Replica, Variation]]:
    for replica in replicas:
        variation = descriptor(replica.backend).find_variation(cluster.device)
        if variation is not None:
            yield replica, variation


def determinism_line(plan: Plan) -> str:
    """Describe how two runs of the plan are made equal; empty if they need not be."""
    if not plan.deterministic:
        return ""
    others = [replica.name for replica, _ in _variations(plan.replicas, plan.cluster)]
    equal = "two runs are equal bit for bit" + (f", except by {', '.join(others)}" if others else "")
    if not is_gpu(plan.cluster.device):
        return (
            f"{equal}, for any number of threads: products of matrices in a fixed order, and torch refuses "
            "operations that it cannot repeat"
        )
    variables: dict[str, str] = {}
    for worker in range(plan.cluster.num_devices):
        variables |= deterministic_variables(plan, worker)
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    return f"{equal}: torch's deterministic algorithms, {settings}"
