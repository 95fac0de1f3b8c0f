"""`attention_choices`: the attention kernel of each replica, which the plan states."""

from __future__ import annotations

from collections.abc import Iterable

from hflow.planner.ir import AttentionChoice, Replica
from hflow.planner.request import PlanRequest
from hflow.planner.traits import ENGINES, traits
from hflow.types.attention_kernel import AttentionKernel, packed_kernel


def attention_choices(replicas: Iterable[Replica], request: PlanRequest) -> tuple[AttentionChoice, ...]:
    """Return the kernel of each replica with the reason for it, as the packages of this machine allow."""
    return tuple(_choice(replica, request) for replica in replicas)


def _choice(replica: Replica, request: PlanRequest) -> AttentionChoice:
    if replica.backend in ENGINES and traits(replica.backend).has_own_attention:
        return AttentionChoice(replica.name, f"that of {replica.backend}", "the engine chooses it")
    device, dtype = request.cluster.device, request.model(replica.model).compute_dtype
    kernel = packed_kernel(device, dtype, has_flash_attn=request.flash_attn is not None)
    if kernel is AttentionKernel.FLASH_ATTN:
        return AttentionChoice(replica.name, f"{kernel} {request.flash_attn}", f"installed, {dtype}")
    if kernel is AttentionKernel.VARLEN:
        return AttentionChoice(replica.name, kernel, f"{dtype}, flash-attn is not installed")
    why = "the cluster is cpu" if device == "cpu" else f"{dtype} has no variable-length kernel"
    return AttentionChoice(replica.name, kernel, why)
