"""Memory of NCCL communicators: the buffers of their channels on a device.

Sizes are those of NCCL 2.30.7 (June 2026) with its defaults, from `src/init.cc`, `src/transport/p2p.cc`,
`net.cc` and `nvls.cc`. NCCL connects an algorithm when it first uses it. Large and small reductions use
different ones, so a ring, a tree and the switches of NVLink count for every group that reduces.

Published measurements of a device: 688 MB for a communicator of 4 A100 that reduces (nccl#964, August 2023),
here the same; 3.28 GB for the connections of an all-to-all of 8 H100 (nccl#1685, April 2025), here 2.82; 7 GB
for megatron t2p2d2 on 8 H100 (verl#6408, May 2026), here 5.5, as hflow has one group for equal ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from hflow.base.devices import is_gpu
from hflow.planner.forecast.communicators import rank_messages
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.traits import BackendTraits
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape

MIB = 1 << 20
BASE_BYTES = 112 * MIB
"""Bytes of a communicator without connections: what nccl#964 measured beyond those."""
RECEIVE_BYTES = 10 * MIB
"""Bytes of a channel from a peer. The buffers of the protocols LL (0.5 MiB), LL128 (4.7) and Simple
(`NCCL_BUFFSIZE`, 4), in pages of 2 MiB."""
SEND_BYTES = 2 * MIB
"""Bytes of a channel to a peer on the machine: a page, as the buffers are the receiver's."""
NETWORK_SEND_BYTES = 10 * MIB
"""Bytes of a channel to a peer on another machine, from whose copy of the buffers the network reads."""
SWITCH_BYTES = 2 * MIB
"""Bytes of a channel through NVLink's switches for each rank: in both directions, 8 steps of 128 KiB."""
NETWORK_MESSAGE_BYTES = 2 * 16 * 128 * 1024
"""Bytes of a channel for messages to other machines, which all peers share."""


class NcclLinks(NamedTuple):
    """The links of a cluster, as far as the memory of communicators depends on them."""

    domain: int
    """Neighbouring devices that reach each other's memory: those of a machine, or of a rack with NVLink."""
    channels: int
    """Channels of a communicator within a domain."""
    network_channels: int
    """Channels of a communicator between domains, for each of its ranks in one."""
    switch_channels: int
    """Channels through the switches of a domain."""


def nccl_links(hardware: Hardware, devices_per_node: int) -> NcclLinks | None:
    """Return the links of a cluster; None if its devices are not GPUs, or no link has channels."""
    if not is_gpu(hardware.device.type) or hardware.intra.channels + hardware.inter.channels == 0:
        return None
    rack = hardware.device.rack
    domain = rack.devices if rack and hardware.rack == hardware.intra else devices_per_node
    link = hardware.intra
    return NcclLinks(domain, link.channels, hardware.inter.channels, link.switch_channels)


def communicator_bytes(
    ranks: Iterable[int], links: NcclLinks, *, broadcasts: bool = False, num_peers: int = 0
) -> int:
    """Return the bytes of a communicator on the device of a rank that exchanges messages with `num_peers`.

    If it only `broadcasts`, NCCL connects a ring alone.
    """
    per_domain = Counter(rank // links.domain for rank in ranks)
    near, is_apart = max(per_domain.values()), len(per_domain) > 1
    channels = links.channels
    if is_apart:
        channels = min(channels, links.network_channels * near) or links.network_channels
    connection = channels * (SEND_BYTES + RECEIVE_BYTES)
    if is_apart:
        connection += links.network_channels * (NETWORK_SEND_BYTES - SEND_BYTES)
    total = BASE_BYTES + connection
    if not broadcasts:
        total += connection  # the tree
        total += links.switch_channels * SWITCH_BYTES * near if near > 1 else 0
    if num_peers:
        for_messages = 1 << max(channels - 1, 0).bit_length()  # a power of two
        total += min(num_peers, near - 1) * for_messages * (SEND_BYTES + RECEIVE_BYTES)
        total += for_messages * NETWORK_MESSAGE_BYTES if is_apart else 0
    return total


@lru_cache(maxsize=4096)
def training_bytes(
    layout: Layout,
    traits: BackendTraits,
    shape: ModelShape | None,
    stage: int,
    links: NcclLinks,
    *,
    sends_matrices: bool,
) -> int:
    """Return the bytes of all communicators of a training replica on the device of a stage's first rank.

    The replica is taken to begin with the first device of a machine.
    """
    rank = stage * layout.stage_size
    groups = rank_messages(layout, traits, shape, rank, sends_matrices=sends_matrices)
    return sum(communicator_bytes(ranks, links, num_peers=num_peers) for ranks, num_peers in groups.items())
