"""The descriptor of the Megatron backend, which imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hflow.base.devices import is_gpu
from hflow.planner.models.descriptors import Backend, TrialRun
from hflow.planner.plan.traits import BackendTraits
from hflow.training.megatron import memory
from hflow.training.megatron.supported_models import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hflow.models.settings import ModelSettings, RankPosition
    from hflow.planner.plan.rows import Replica

HARDWARE_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Hardware queues of a device, read when CUDA starts. With one, kernels run in the order in which the host
launches them, so that collectives between tensor ranks begin before the products that they overlap with.
FSDP2 needs the default of several, so the variable is set only for tensor ranks."""


def _make_model(settings: ModelSettings, position: RankPosition) -> Any:
    from hflow.training.megatron.device import prepare

    prepare(settings.device)  # before anything imports megatron
    from hflow.training.megatron.backend import MegatronModel

    return MegatronModel(settings, position)


def _environment(replica: Replica, device: str) -> Mapping[str, str]:
    return {HARDWARE_QUEUES: "1"} if is_gpu(device) and replica.layout.tensor > 1 else {}


def _check_model(settings: ModelSettings, config: PreTrainedConfig) -> None:
    """Check sizes, packages and the checkpoint's tensors once, as otherwise every rank would report it."""
    from hflow.models.adapter import check_installed
    from hflow.models.hf_config import translate_errors
    from hflow.training.megatron.checkpoint_reader import open_weights
    from hflow.training.megatron.supported_models import supported_shape

    check_installed(settings)
    with translate_errors(settings.name):
        shape = supported_shape(config, settings.head)
        if settings.path is not None:
            with open_weights(settings, shape):
                pass


_EMBEDDED = "models.actor.gen.engine=embedded"
_DETERMINISTIC = "deterministic=true"
_MEGATRON = ("models.actor.backend=megatron", "models.actor.layout=d{half}t2p1")

_TRIAL_RUNS = (
    TrialRun(
        "megatron",
        "tensor parallelism",
        (_EMBEDDED, *_MEGATRON),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "megatron stages",
        "pipeline stages, whose state is in host memory between nodes",
        (
            *(_EMBEDDED, "models.actor.backend=megatron", "models.actor.layout=d{half}t1p2"),
            "models.actor.offload=all",
        ),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "megatron context",
        "context ranks",
        (_EMBEDDED, "models.actor.backend=megatron", "models.actor.layout=d{half}c2"),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "megatron experts",
        "expert ranks",
        (
            *(_EMBEDDED, "models.actor.backend=megatron", "models.actor.layout=d{n}e2"),
            *("model@models.actor=tiny-qwen3-moe", "models.actor.path=null"),
        ),
        min_devices=2,
        multiple=2,
        package="megatron",
    ),
    TrialRun(
        "equal runs of megatron",
        "megatron with deterministic=true",
        (_DETERMINISTIC, *_MEGATRON),
        min_devices=2,
        multiple=2,
        package="megatron",
        recipe="sft",
        is_repeated=True,
    ),
)
"""Runs by which `hflow doctor` tries megatron on real devices."""

BACKEND = Backend(
    name="megatron",
    traits=BackendTraits(
        sharded_over_data="optimizer",
        overlaps_optimizer=True,
        is_model_parallel=True,
        has_pipeline_axis=True,
        has_context_axis=True,
        has_expert_axis=True,
        sends_expert_copies=True,  # megatron's all-to-all dispatcher
        vocab_multiple=128,
        shares_prompts=True,
        has_adapters=True,
        chooses_kernels=True,
        families=FAMILIES,
    ),
    factory=_make_model,
    memory=memory,
    packages=("megatron",),
    install="pip install megatron-core",
    distributions=("megatron-core",),
    trial_runs=_TRIAL_RUNS,
    purpose="tensor, pipeline, context and expert parallelism",
    environment=_environment,
    deterministic_variables={"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    needs_process_per_rank=True,
    update_dtypes=("fp32",),  # in bf16 it keeps bf16 weights, which are too coarse for small updates
    check_model=_check_model,
)
