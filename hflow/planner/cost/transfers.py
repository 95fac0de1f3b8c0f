"""Seconds of transfers: inputs of nodes, new weights, checkpoints."""

from __future__ import annotations

import math

from hflow.planner.cost.collectives import LinkTime, RankPlacement, all_gather, send
from hflow.planner.cost.flops import stage_parameters
from hflow.planner.cost.replica_costs import ReplicaCosts
from hflow.planner.cost.roofline import MEMORY, Part
from hflow.planner.forecast import EdgeTraffic
from hflow.planner.hardware import Hardware
from hflow.planner.ir import WeightRoute

BUCKET_BYTES = 64 << 20
"""Weights are transferred in buckets of about this size."""
MASTER_BYTES = 4
"""Weights are saved in fp32."""
STATE_BYTES = 12
"""The optimizer state that is saved besides: fp32 weights and two moments."""
DISK_BYTES_PER_S = 1e9
"""Assumed rate of one process on the disk for checkpoints and weights."""


def redistribute(edge: EdgeTraffic, hardware: Hardware) -> Part:
    """Return the seconds of moving a node's inputs: the busiest worker's bytes, and one round trip.

    The fraction of them that crosses machines is assumed to be that of all bytes.
    """
    if not edge.num_bytes:
        return LinkTime().part("redistribution")
    between = edge.busiest_bytes * edge.num_node_bytes / edge.num_bytes
    link_time = send(edge.busiest_bytes - between, hardware.intra, hardware)
    link = hardware.inter if between else hardware.intra
    return (link_time + send(between, link, hardware)).part("redistribution")


def load_weights(route: WeightRoute, replica: ReplicaCosts, ranks: RankPlacement) -> list[Part]:
    """Return the seconds in which all engines of a replica load new weights at once.

    Slices that several engines on one machine need cross the network once.

    Args:
        route: gives the bytes.
        replica: the replica that loads the weights.
        ranks: how its workers are placed.
    """
    if route.how == "shared":
        return []
    hardware, num = replica.hardware, replica.layout.world
    needed = (route.moved_bytes + route.held_bytes) / num
    copies = max(1, ranks.per_machine // (replica.layout.tensor * replica.layout.pipe))
    between = route.node_bytes / num / copies
    link_time = send(route.moved_bytes / num - between, hardware.intra, hardware)
    if between:
        link_time += send(between, hardware.inter, hardware)
    if route.transport == "disk":
        return [
            Part("disk", needed / DISK_BYTES_PER_S, "disk"),
            Part("copy", 2 * needed / replica.rates.memory, MEMORY),
        ]
    return [
        LinkTime(link_time.transfer, link_time.latency * math.ceil(needed / BUCKET_BYTES)).part("weights"),
        Part("copy", 2 * needed / replica.rates.memory, MEMORY),
    ]


def publish_weights(route: WeightRoute, source: ReplicaCosts, engine: ReplicaCosts) -> list[Part]:
    """Return the seconds of copying what one training rank sends, once for all engines that need it."""
    sent_bytes = route.moved_bytes / engine.layout.data / source.layout.world
    if route.transport == "disk":
        return [Part("disk", sent_bytes / DISK_BYTES_PER_S, "disk")]
    return [Part("copy", 2 * sent_bytes / source.rates.memory, MEMORY)]


def save_checkpoint(replica: ReplicaCosts) -> list[Part]:
    """Return the seconds of a checkpoint.

    One process gathers and writes the weights, and each rank writes its optimizer state.
    """
    numel = stage_parameters(replica.shape, replica.layout.pipe) / replica.layout.tensor
    gather = all_gather(numel * MASTER_BYTES, replica.data, replica.hardware)
    whole = numel * replica.layout.tensor * replica.layout.pipe
    parts = [gather.part("all-gather"), Part("disk", whole * MASTER_BYTES / DISK_BYTES_PER_S, "disk")]
    if replica.config.save_optimizer:
        share = whole * STATE_BYTES / replica.layout.world
        parts.append(Part("optimizer's state", share / DISK_BYTES_PER_S, "disk"))
    return parts
