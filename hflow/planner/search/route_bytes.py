"""The bytes that new weights move, without the rows of their route.

`add_rows` counts them exactly, slice by slice, and `order_engine_ranks` chooses the devices of an engine's
ranks by these bytes. A search compares thousands of pairs of layouts, so it does the same with the shares of
an average tensor. Norms count as if they were sharded.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from hflow.planner.make.engine_ranks import MIN_SAVING, best_order
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Replica, WeightRoute
from hflow.planner.plan.traits import traits
from hflow.shapes.model_shape import ModelShape, expert_parameters, num_parameters, tensors


def with_bytes(
    route: WeightRoute, src: Replica, dst: Replica, shape: ModelShape, item_bytes: int, cluster: ClusterSpec
) -> WeightRoute:
    """Return a route with the bytes that it moves, estimated, with the engine's ranks in the best order.

    The arguments are those of `add_rows`.
    """
    experts = item_bytes * expert_parameters(shape)
    others = item_bytes * num_parameters(shape) - experts
    of_experts, of_others = experts * dst.layout.num_expert_copies, others * dst.layout.num_copies
    needed = of_experts + of_others
    held = local = 0.0
    if common := tuple(sorted(set(src.workers) & set(dst.workers))):
        on_machines = tuple(cluster.machines(common).values())
        held = others * _held_models(src, dst, shape, on_machines)
        held += experts * _held_experts(src, dst, shape, on_machines)
    receivers, senders = cluster.machines(dst.workers), cluster.machines(src.workers)
    near = sum(num for machine, num in receivers.items() if machine in senders) / len(dst.workers)
    if near:
        num = min(cluster.devices_per_node, src.layout.world)
        local = of_experts * _machine_share(src, num, src.layout.expert) + of_others * _machine_share(
            src, num
        )
        local *= near
    return replace(
        route,
        moved_bytes=round(max(0.0, needed - held)),
        node_bytes=round(max(0.0, needed - max(held, local))),
        held_bytes=round(held),
    )


def _held_models(src: Replica, dst: Replica, shape: ModelShape, machines: tuple[int, ...]) -> float:
    """Return the part of their needs that workers hold, all together, in copies of the model.

    The first of the common workers on the machines counts as the first one of both replicas.
    """
    num_shards, stages = dst.layout.tensor, src.layout.pipe * dst.layout.pipe
    if not traits(src.backend).shards_weights:
        return _held_tensors(src.layout.tensor, num_shards, machines) / stages
    by_rows = _split_by_rows(shape)
    rows = _held_tensors(src.layout.fsdp_size, num_shards, machines)
    return (by_rows * rows + (1 - by_rows) * src.layout.replicate / num_shards) / dst.layout.pipe


def _held_experts(src: Replica, dst: Replica, shape: ModelShape, machines: tuple[int, ...]) -> float:
    """Return the same in copies of all experts, with the ranks of expert axes in the order of devices."""
    if src.layout.expert == dst.layout.expert == 1 or traits(src.backend).shards_weights:
        return _held_models(src, dst, shape, machines)
    common = 0.0
    for worker in range(sum(machines)):
        (t, e), (other_t, other_e) = _expert_shard(src, worker), _expert_shard(dst, worker)
        tensors_in_common = _overlap(t, src.layout.tensor, other_t, dst.layout.tensor)
        common += tensors_in_common * _overlap(e, src.layout.expert, other_e, dst.layout.expert)
    return common / src.layout.pipe / dst.layout.pipe


def _expert_shard(replica: Replica, rank: int) -> tuple[int, int]:
    """Return the tensor and the expert index of a rank."""
    layout = replica.layout
    copy = rank // layout.copy_stride(rank_order(replica.role)) % layout.num_copies
    return rank % layout.tensor, copy % layout.expert


def _overlap(i: int, num: int, j: int, other_num: int) -> float:
    """Return the common share of part `i` of `num` equal parts and part `j` of `other_num`."""
    return max(0.0, min((i + 1) / num, (j + 1) / other_num) - max(i / num, j / other_num))


@lru_cache(maxsize=4096)
def _held_tensors(num_parts: int, num_shards: int, machines: tuple[int, ...]) -> float:
    """Return the part of their needs that workers hold, all together, in copies of one tensor.

    Worker `w` holds part `w % num_parts` of the tensor, and rank `r` needs shard `r % num_shards`. On
    `machines` are so many workers each.
    """
    unit = math.lcm(num_parts, num_shards)
    first = in_order = best = 0
    for size in machines:
        before, after = _held_on_machine(num_parts, num_shards, first % unit, size)
        in_order, best, first = in_order + before, best + after, first + size
    needed = unit * first // num_shards
    return (best if best - in_order > MIN_SAVING * needed else in_order) / unit


@lru_cache(maxsize=4096)
def _held_on_machine(num_parts: int, num_shards: int, first: int, num: int) -> tuple[int, int]:
    """Return the part of their needs that one machine's workers hold.

    Args:
        num_parts: the argument of `_held_tensors` with this name.
        num_shards: the argument of `_held_tensors` with this name.
        first: index of the first worker.
        num: number of workers.

    Returns:
        Entries with ranks in the order of devices, and in the best order, of a tensor with
        `lcm(num_parts, num_shards)` entries.
    """
    unit = math.lcm(num_parts, num_shards)
    part, shard = unit // num_parts, unit // num_shards
    starts = [worker % num_parts * part for worker in range(first, first + num)]
    held = tuple(
        tuple(max(0, min(start + part, (s + 1) * shard) - max(start, s * shard)) for s in range(num_shards))
        for start in starts
    )
    shards = tuple(rank % num_shards for rank in range(first, first + num))
    before, after = (
        sum(held[device][s] for device, s in zip(order, shards, strict=True))
        for order in (range(num), best_order(held, shards))
    )
    return before, after


@lru_cache
def _split_by_rows(shape: ModelShape) -> float:
    """Return the share of a model's entries in tensors that tensor parallelism splits along the first axis.

    Backends that shard everything split all tensors along this axis.
    """
    rows = sum(spec.numel for spec in tensors(shape) if spec.split_axis == 0)
    return rows / num_parameters(shape)


def _machine_share(src: Replica, per_machine: int, num_expert: int = 1) -> float:
    """Return the share of a model that a machine's workers hold together, or of what expert ranks divide."""
    layout = src.layout
    if traits(src.backend).shards_weights:
        return min(1.0, per_machine / layout.fsdp_size)
    shards = min(1.0, per_machine / (layout.tensor * num_expert))
    return min(1.0, shards * max(1.0, per_machine / layout.stage_size) / layout.pipe)
