"""The descriptor of the vLLM engine, which does not import vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hflow.engines.vllm import memory
from hflow.engines.vllm.checks import CUDA_INSTALL, check, find_conflict, head_size_problem
from hflow.engines.vllm.trials import TRIAL_RUNS
from hflow.planner.models.architectures import FAMILIES
from hflow.planner.models.descriptors import ApiServer, EngineKind, Variation
from hflow.planner.plan.traits import BackendTraits

if TYPE_CHECKING:
    from hflow.engines.interface import EngineSetup


def _make_engine(setup: EngineSetup) -> Any:
    from hflow.engines.vllm.engine import VllmEngine

    return VllmEngine(setup)


def _make_server(setup: EngineSetup, host: str, port: int, api_key: str | None) -> ApiServer:
    from hflow.engines.vllm.api_server import VllmApiServer

    return VllmApiServer(setup, host, port, api_key)


BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Lets vLLM use kernels whose result for a sequence does not depend on the others of its batch, on CUDA."""


def _find_variation(device: str) -> Variation | None:
    if device == "cuda":
        return None
    return Variation(
        "on CPUs, vLLM's kernels round by the sequences that are decoded together, which depends on timing",
        "gen.engine=embedded",
    )


ENGINE = EngineKind(
    name="vllm",
    traits=BackendTraits(
        sharded_over_data="nothing",
        is_model_parallel=True,
        vocab_multiple=64,
        pads_whole_vocab=True,
        families=tuple(FAMILIES),
        has_own_process=True,
        has_own_attention=True,
        merges_adapters=True,
    ),
    factory=_make_engine,
    memory=memory,
    packages=("vllm",),
    install=CUDA_INSTALL,
    distributions=("vllm",),
    trial_runs=TRIAL_RUNS,
    purpose="fast generation, by default on GPUs",
    find_conflict=find_conflict,
    deterministic_variables={BATCH_INVARIANT: "1"},
    find_variation=_find_variation,
    preferred_on=("cuda",),
    check=check,
    find_unservable=head_size_problem,
    server=_make_server,
)
