"""`thinned`: one machine in several, with its part of the batch, represents a large cluster.

The estimate of a step's traffic costs a little time for every sample. On thousands of machines it would take
longer than all other planning, though all machines are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hflow.planner.data.group_placement import stream_heads
from hflow.planner.ir import Plan
from hflow.planner.request import PlanRequest

MIN_SAMPLES = 512
"""Samples of a batch, and machines, below which nothing is left out."""
MIN_MACHINES = 8


@dataclass(frozen=True)
class Thinned:
    """A plan and its request, reduced for the estimate of traffic. Use it for nothing else."""

    plan: Plan
    """Rules and generation replicas with the dp-heads on the chosen machines. Nodes with few dp-heads keep
    all of them."""
    request: PlanRequest
    """With the chosen machines' part of the batch and of the samples in flight."""
    scale: int
    """Number of machines that one represents; 1: nothing is left out."""
    factors: dict[str, float]
    """Node -> by how much to multiply the bytes of one of its dp-heads, where that is not 1."""
    source_factor: float = 1
    """The same for the workers that generate."""


def thinned(plan: Plan, request: PlanRequest) -> Thinned:
    """Return the plan with one machine in `scale`, which is 1 on small clusters and for small batches.

    One machine is chosen of each block of `scale` machines: of block b the one at b modulo `scale`, so that
    the chosen machines have all parts of layouts that span several machines.
    """
    cluster, stream = plan.cluster, plan.schedule.streams[0]
    scale = _scale(request.batch * stream.group_size, cluster.num_nodes)
    if scale == 1:
        return Thinned(plan, request, 1, {})

    def thin(heads: Sequence[int]) -> tuple[int, ...]:
        kept = tuple(head for head in heads if _is_chosen(cluster.node_of(head), scale))
        return kept if len(kept) > 1 else tuple(heads)

    rules = tuple(replace(rule, heads=thin(rule.heads)) for rule in plan.rules)
    replicas = tuple(replace(replica, heads=thin(replica.heads)) for replica in plan.replicas)
    smaller = replace(plan, rules=rules, replicas=replicas)
    pairs = zip(plan.rules, rules, strict=True)
    schedule = replace(request.schedule, max_concurrent=max(1, request.schedule.max_concurrent // scale))
    return Thinned(
        plan=smaller,
        request=replace(request, batch=max(1, request.batch // scale), schedule=schedule),
        scale=scale,
        factors={rule.consumer: scale * len(fewer.heads) / len(rule.heads) for rule, fewer in pairs},
        source_factor=scale * len(stream_heads(smaller, stream)) / len(stream_heads(plan, stream)),
    )


def _scale(num_samples: int, num_machines: int) -> int:
    """Return how many machines one represents: if possible a divisor, so that dp-heads keep their load."""
    most = min(num_samples // MIN_SAMPLES, num_machines // MIN_MACHINES)
    divisors = [scale for scale in range(most // 4 + 1, most + 1) if num_machines % scale == 0]
    return max(1, divisors[-1] if divisors else most)


def _is_chosen(machine: int, scale: int) -> bool:
    block, index = divmod(machine, scale)
    return index == block % scale
