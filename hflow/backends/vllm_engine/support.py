"""What vLLM cannot serve, from the plan alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hflow.backends.vllm_engine.memory import smallest_cache
from hflow.planner.forecast.memory.rank import Rank
from hflow.planner.models.architectures import FAMILIES, can_run
from hflow.planner.models.descriptors import ServedModel
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.layout import RankOrder
from hflow.planner.plan.model_shape import ModelShape

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on CPUs: `CPUAttentionBackend.get_supported_head_sizes` in
`vllm/v1/attention/backends/cpu_attn.py`, vLLM 0.32."""


def check(served: ServedModel) -> Iterator[str]:
    """Yield why vLLM cannot serve a model, each with what to set instead."""
    replica, shape = served.replica, served.shape
    key = f"models.{replica.model}"
    if shape is None or not can_run(shape):
        need = f"{replica.name}: vllm needs to know the tensors of the model"
        if served.family is None:
            yield (
                f"{need}, but {key} has neither a checkpoint on this machine nor an architecture. Set "
                f"{key}.path or {key}.architecture."
            )
        else:
            yield (
                f"{need}, which the planner knows for {', '.join(FAMILIES)}, but not for {served.family}. "
                f"Set {key}.gen.engine=embedded."
            )
        return
    if shape.head != "lm":
        yield (
            f"{replica.name}: vllm cannot generate with a {shape.head} head. Set {key}.gen.engine=embedded."
        )
    if served.cluster.device == "cpu" and shape.head_dim not in CPU_HEAD_SIZES:
        yield (
            f"{replica.name}: vllm's attention on CPUs has no kernel for heads of size {shape.head_dim} (it "
            f"has {', '.join(map(str, CPU_HEAD_SIZES))}). Set {key}.gen.engine=embedded."
        )
    yield from _too_small_cache(served, shape)
    yield from _ranks_apart(served)


def _too_small_cache(served: ServedModel, shape: ModelShape) -> Iterator[str]:
    """Yield a reason where the configured cache does not hold the longest sequence."""
    replica, gen = served.replica, served.config.gen
    if gen.cache_gib is None or shape.num_heads % replica.layout.tensor:
        return
    rank = Rank(replica, shape, served.config, 0, True, served.cluster.device == "cpu")
    smallest = smallest_cache(rank)
    if round(gen.cache_gib * GIB) < smallest:
        key = f"models.{replica.model}.gen.cache_gib"
        fitting = math.ceil(smallest / GIB * 1000) / 1000
        yield (
            f"{key} is {gen.cache_gib:g}, but a sequence of max_model_len {gen.max_model_len} needs "
            f"{fitting:g} GiB. Set {key}={fitting:g} or more, or a smaller max_model_len."
        )


def _ranks_apart(served: ServedModel) -> Iterator[str]:
    """Yield a reason where the tensor ranks of an engine are on several machines."""
    replica, layout = served.replica, served.replica.layout
    machines: dict[int, set[int]] = {}
    for rank, worker in enumerate(replica.workers):
        data_rank = layout.coords(RankOrder.GENERATE, rank)[0]
        machines.setdefault(data_rank, set()).add(served.cluster.node_of(worker))
    if any(len(of_engine) > 1 for of_engine in machines.values()):
        yield (
            f"{replica.name} has layout {layout}, whose tensor ranks are on several machines, but a vllm "
            f"engine runs on one. Set models.{replica.model}.gen.layout to at most "
            f"t{served.cluster.devices_per_node}, or give it neighbouring devices of one machine."
        )
