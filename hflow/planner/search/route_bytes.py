"""The bytes that new weights move, without the rows of their route.

`add_rows` counts them exactly, slice by slice. A search compares thousands of pairs of layouts, so it takes
the means over all ranks: norms count as if they were sharded, and tensor ranks as if all tensors were cut
along the same axis.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from hflow.planner.backends import traits
from hflow.planner.ir import ClusterSpec, Replica, WeightRoute
from hflow.planner.model_shape import ModelShape, num_parameters


def with_bytes(
    route: WeightRoute, src: Replica, dst: Replica, shape: ModelShape, item_bytes: int, cluster: ClusterSpec
) -> WeightRoute:
    """Return a route with the bytes that it moves, estimated; the arguments are those of `add_rows`."""
    model = item_bytes * num_parameters(shape)
    needed = model * dst.layout.data
    held = local = 0.0
    if src.workers == dst.workers:
        held = dst.layout.world * model * _common_share(src, dst)
    per_machine, machines = cluster.devices_per_node, {cluster.node_of(w) for w in src.workers}
    if machines & {cluster.node_of(w) for w in dst.workers}:
        local = needed * _machine_share(src, min(per_machine, src.layout.world))
    return replace(
        route,
        moved_bytes=round(max(0.0, needed - held)),
        node_bytes=round(max(0.0, needed - max(held, local))),
        held_bytes=round(held),
    )


def _common_share(src: Replica, dst: Replica) -> float:
    """Return the share of the model that a worker holds and needs, on average over the workers."""
    layout = src.layout
    if traits(src.backend).sharded_over_data == "everything":
        return 1 / layout.world / dst.layout.tensor / dst.layout.pipe
    return _overlap(layout.tensor, dst.layout.tensor) / layout.pipe / dst.layout.pipe


@lru_cache
def _overlap(src: int, dst: int) -> float:
    """Return the mean overlap of a worker's two tensor shards, of its index modulo either size."""
    num = math.lcm(src, dst)
    total = 0
    for worker in range(num):
        a, b = worker % src, worker % dst
        total += max(0, min((a + 1) * dst, (b + 1) * src) - max(a * dst, b * src))
    return total / num / (src * dst)


def _machine_share(src: Replica, per_machine: int) -> float:
    """Return the share of the model that the workers of one machine hold together."""
    layout = src.layout
    if traits(src.backend).sharded_over_data == "everything":
        return per_machine / layout.world
    shards = min(1.0, per_machine / layout.tensor)
    return min(1.0, shards * max(1.0, per_machine / (layout.data * layout.tensor)) / layout.pipe)
