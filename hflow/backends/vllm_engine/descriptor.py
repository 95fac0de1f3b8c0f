"""The descriptor of the vLLM engine, which does not import vLLM."""

from __future__ import annotations

from hflow.backends.vllm_engine import memory
from hflow.backends.vllm_engine.installed import CUDA_INSTALL, find_conflict
from hflow.backends.vllm_engine.support import check
from hflow.planner.backends import BackendTraits, EngineKind

ENGINE = EngineKind(
    name="vllm",
    traits=BackendTraits(
        sharded_over_data="nothing",
        is_model_parallel=True,
        vocab_multiple=64,
        pads_whole_vocab=True,
        step_host_ms=2.5,
    ),
    factory=None,
    memory=memory,
    packages=("vllm",),
    install=CUDA_INSTALL,
    purpose="fast generation, by default on GPUs",
    find_conflict=find_conflict,
    preferred_on=("cuda",),
    check=check,
)
