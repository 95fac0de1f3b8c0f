"""Seconds of what moves between nodes and replicas: inputs, new weights, checkpoints."""

from __future__ import annotations

import math

from hflow.planner.cost.collectives import Ranks, Wire, all_gather, send
from hflow.planner.cost.flops import stage_parameters
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.roofline import MEMORY, Part
from hflow.planner.forecast import EdgeTraffic
from hflow.planner.hardware import Hardware
from hflow.planner.ir import WeightRoute

BUCKET_BYTES = 64 << 20
"""Weights travel in buckets of about this size."""
MASTER_BYTES = 4
"""Weights are saved in fp32."""
STATE_BYTES = 12
"""And once more, with two moments, for the optimizer to go on."""
DISK_BYTES_PER_S = 1e9
"""What one reader or writer is assumed to reach on the disk that checkpoints and weights go to."""


def redistribution(edge: EdgeTraffic, hardware: Hardware) -> Part:
    """A node's inputs: the busiest worker's bytes, and one request with its answer.

    The share of them that crosses machines is assumed to be that of all bytes.
    """
    if not edge.num_bytes:
        return Wire().part("redistribution")
    between = edge.busiest_bytes * edge.num_node_bytes / edge.num_bytes
    wire = send(edge.busiest_bytes - between, hardware.intra, hardware)
    link = hardware.inter if between else hardware.intra
    return (wire + send(between, link, hardware)).part("redistribution")


def sync(route: WeightRoute, side: ReplicaCosts, ranks: Ranks) -> list[Part]:
    """New weights for all engines of a replica, which take them at once.

    Engines on one machine that need the same slices let them cross the network once, and share them.

    Args:
        route: bytes by the plan's rows.
        side: the replica that takes the weights.
        ranks: where its workers lie.
    """
    if route.how == "shared":
        return []
    hardware, num = side.hardware, side.layout.world
    needed = (route.moved_bytes + route.held_bytes) / num
    copies = max(1, ranks.per_machine // (side.layout.tensor * side.layout.pipe))
    between = route.node_bytes / num / copies
    wire = send(route.moved_bytes / num - between, hardware.intra, hardware)
    if between:
        wire += send(between, hardware.inter, hardware)
    if route.transport == "disk":
        return [
            Part("disk", needed / DISK_BYTES_PER_S, "disk"),
            Part("copy", 2 * needed / side.rates.memory, MEMORY),
        ]
    return [
        Wire(wire.transfer, wire.latency * math.ceil(needed / BUCKET_BYTES)).part("weights"),
        Part("copy", 2 * needed / side.rates.memory, MEMORY),
    ]


def publishing(route: WeightRoute, source: ReplicaCosts, engine: ReplicaCosts) -> list[Part]:
    """A copy of what one trainer gives, made once for all engines that take the same."""
    given = route.moved_bytes / engine.layout.data / source.layout.world
    if route.transport == "disk":
        return [Part("disk", given / DISK_BYTES_PER_S, "disk")]
    return [Part("copy", 2 * given / source.rates.memory, MEMORY)]


def saving(side: ReplicaCosts) -> list[Part]:
    """A checkpoint: weights gathered and written by one process; each rank writes its optimizer's state."""
    numel = stage_parameters(side.shape, side.layout.pipe) / side.layout.tensor
    gather = all_gather(numel * MASTER_BYTES, side.data, side.hardware)
    whole = numel * side.layout.tensor * side.layout.pipe
    parts = [gather.part("all-gather"), Part("disk", whole * MASTER_BYTES / DISK_BYTES_PER_S, "disk")]
    if side.asked.save_optimizer:
        share = whole * STATE_BYTES / side.layout.world
        parts.append(Part("optimizer's state", share / DISK_BYTES_PER_S, "disk"))
    return parts
