"""Seconds of collectives, over the links within machines and those between them.

Bandwidth terms are those of ring algorithms, which are optimal (Patarasuk and Yuan 2009). Ranks on
several machines exchange within each machine first, so that every rank's own port carries an equal
share between machines (NCCL's rings over several ports do likewise). The smallest message takes the
link's latency once for each doubling of the ranks, as in a tree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hflow.planner.cost.roofline import LATENCY, NETWORK, Part
from hflow.planner.hardware import Hardware, Link
from hflow.planner.ir import ClusterSpec, Replica
from hflow.planner.routing import rank_order


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a collective lie: so many on each of so many machines."""

    per_machine: int = 1
    machines: int = 1

    @property
    def num(self) -> int:
        """All ranks."""
        return self.per_machine * self.machines

    @classmethod
    def of(cls, devices: Iterable[int], cluster: ClusterSpec) -> Ranks:
        """Where devices lie. Uneven shares count as the smallest, whose ports carry most."""
        on = Counter(cluster.node_of(device) for device in devices)
        return cls(min(on.values()), len(on))


@dataclass(frozen=True)
class Wire:
    """Seconds on links: for the bytes, and for the messages as such."""

    transfer: float = 0.0
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        """Both."""
        return self.transfer + self.latency

    def __add__(self, other: Wire) -> Wire:
        """One after the other."""
        return Wire(self.transfer + other.transfer, self.latency + other.latency)

    def times(self, num: float) -> Wire:
        """So many of it, one after the other."""
        return Wire(self.transfer * num, self.latency * num)

    def part(self, name: str) -> Part:
        """As a part of a node's time."""
        return Part(name, self.seconds, NETWORK if self.transfer >= self.latency else LATENCY)


def all_gather(num_bytes: float, ranks: Ranks, hardware: Hardware) -> Wire:
    """Every rank holds its share of `num_bytes`, and in the end all of them. Also a reduce-scatter."""
    k, m = ranks.per_machine, ranks.machines
    within = (k - 1) / k * num_bytes * _a_byte(hardware.intra, hardware)
    between = (m - 1) / m * num_bytes / k * _a_byte(hardware.inter, hardware)
    return Wire(within + between, _hops(k, hardware.intra) + _hops(m, hardware.inter))


def reduce_scatter(num_bytes: float, ranks: Ranks, hardware: Hardware) -> Wire:
    """Every rank holds `num_bytes`, and in the end its share of their sum: an all-gather in reverse."""
    return all_gather(num_bytes, ranks, hardware)


def all_reduce(num_bytes: float, ranks: Ranks, hardware: Hardware) -> Wire:
    """Every rank holds `num_bytes`, and in the end their sum: `2 (n - 1) / n` of them cross each link."""
    once = all_gather(num_bytes, ranks, hardware)
    return Wire(2 * once.transfer, once.latency)


def send(num_bytes: float, link: Link, hardware: Hardware) -> Wire:
    """One message from one device to another."""
    return Wire(num_bytes * _a_byte(link, hardware), link.latency_us * 1e-6)


def axis_ranks(replica: Replica, axis: int, cluster: ClusterSpec) -> Ranks:
    """The ranks along one axis (0 data, 1 tensor, 2 pipe) of a replica, where they lie furthest apart."""
    order = rank_order(replica.role)
    lines: dict[Sequence[int], list[int]] = {}
    for rank, worker in enumerate(replica.workers):
        coords = replica.layout.coords(order, rank)
        lines.setdefault(coords[:axis] + coords[axis + 1 :], []).append(worker)
    return max(
        (Ranks.of(line, cluster) for line in lines.values()), key=lambda r: (r.machines, -r.per_machine)
    )


def _a_byte(link: Link, hardware: Hardware) -> float:
    """Seconds of one byte on a link."""
    return 1 / (link.gb_per_s * 1e9 * hardware.device.efficiency.network)


def _hops(num: int, link: Link) -> float:
    return math.ceil(math.log2(num)) * link.latency_us * 1e-6
