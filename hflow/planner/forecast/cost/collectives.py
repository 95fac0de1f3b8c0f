"""Seconds of collectives, over the links within machines, within racks and between racks.

Bandwidth terms are those of ring algorithms, which are optimal (Patarasuk and Yuan 2009). Ranks on several
machines exchange within each machine first, so that every rank's own port carries an equal share between
machines, as NCCL's rings over several ports do. Racks are a third level of the same kind. The latency term is
that of a tree: the link's latency once for each doubling of the ranks, and twice in an all-reduce, which goes
up and down the tree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from hflow.planner.forecast.cost.roofline import LATENCY, NETWORK, Part
from hflow.planner.plan.calibration import LinkRate
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.hardware import Hardware, Link
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Replica
from hflow.shapes.layout import Layout


@dataclass(frozen=True)
class RankPlacement:
    """The placement of a collective's ranks on machines."""

    per_machine: int = 1
    machines: int = 1
    """Number of machines in all racks together."""
    racks: int = 1

    @property
    def num(self) -> int:
        """Number of ranks."""
        return self.per_machine * self.machines

    @classmethod
    def of(cls, devices: Sequence[int], cluster: ClusterSpec, hardware: Hardware) -> RankPlacement:
        """Return the placement of devices. Uneven numbers count as the smallest, whose ports carry most."""
        return cls.counted(devices, cluster, _rack_size(hardware))

    @classmethod
    def counted(cls, devices: Sequence[int], cluster: ClusterSpec, rack_size: int | None) -> RankPlacement:
        """Return the placement of devices, given the size of a rack; None: there are no racks."""
        on = Counter([device // cluster.devices_per_node for device in devices])
        num_racks = len({device // rack_size for device in devices}) if rack_size else 1
        return cls(min(on.values()), len(on), num_racks)

    def slowest_link(self, hardware: Hardware) -> Link:
        """Return the link of the longest way between two of the ranks."""
        if self.racks > 1:
            return hardware.inter
        return hardware.within_rack if self.machines > 1 else hardware.intra


class LinkTime(NamedTuple):
    """Seconds on links: for transferring bytes, and for latency. A search makes hundreds of thousands."""

    transfer: float = 0.0
    latency: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of both."""
        return self.transfer + self.latency

    def __add__(self, other: LinkTime) -> LinkTime:  # type: ignore[override]
        """Return the time of one after the other."""
        return LinkTime(self.transfer + other.transfer, self.latency + other.latency)

    def times(self, num: float) -> LinkTime:
        """Return the time repeated one after the other."""
        return LinkTime(self.transfer * num, self.latency * num)

    def part(self, name: str) -> Part:
        """Return it as a part of a node's time."""
        return Part(name, self.seconds, NETWORK if self.transfer >= self.latency else LATENCY)


def all_gather(num_bytes: float, ranks: RankPlacement, hardware: Hardware) -> LinkTime:
    """Return the time of an all-gather after which every rank holds `num_bytes`."""
    transfer, latency, share = 0.0, 0.0, num_bytes
    for num, link in _levels(ranks, hardware):
        rate = hardware.link_rate(link)
        transfer += (num - 1) / num * share * _seconds_per_byte(link, hardware, rate)
        latency += math.ceil(math.log2(num)) * link.latency_us + rate.launch_us
        share /= num
    return LinkTime(transfer, latency * 1e-6)


def reduce_scatter(num_bytes: float, ranks: RankPlacement, hardware: Hardware) -> LinkTime:
    """Return the time of a reduce-scatter of `num_bytes` on every rank: an all-gather in reverse."""
    return all_gather(num_bytes, ranks, hardware)


def all_reduce(num_bytes: float, ranks: RankPlacement, hardware: Hardware) -> LinkTime:
    """Return the time of an all-reduce: a reduce-scatter and an all-gather, launched as one."""
    once = all_gather(num_bytes, ranks, hardware)
    launching = sum(hardware.link_rate(link).launch_us for _, link in _levels(ranks, hardware))
    return LinkTime(2 * once.transfer, 2 * once.latency - launching * 1e-6)


def dispatch(num_bytes: float, copies: float, ranks: RankPlacement, hardware: Hardware) -> LinkTime:
    """Return the time in which every rank sends each of its tokens to ranks that are chosen at random.

    A token crosses to a machine once, and to a rank of it once, even if it is for several of its experts. It
    reaches `u (1 - (1 - 1 / u)^copies)` of u machines, and of u ranks in the same way. Source: DeepEP's
    kernels for dispatch and combine (github.com/deepseek-ai/DeepEP). `num_bytes` counts each of one rank's
    tokens once, and each is for `copies` experts.
    """
    time, units = LinkTime(), float(ranks.num)
    for num, link in _levels(ranks, hardware):
        reached = units * (1 - (1 - 1 / units) ** copies)
        crossing = num_bytes * reached * (num - 1) / num
        latency = math.ceil(math.log2(num)) * link.latency_us * 1e-6
        time += LinkTime(crossing * _seconds_per_byte(link, hardware, hardware.exchange_rate(link)), latency)
        units /= num
    return time


def all_to_all(num_bytes: float, ranks: RankPlacement, hardware: Hardware) -> LinkTime:
    """Return the time in which every rank sends an equal part of `num_bytes` to each rank.

    Each part takes the link to its rank, so machines are sent as many bytes as ranks of them need. NCCL sends
    them at the rate of its other collectives, not at that of kernels that are made for this. Between
    machines, the messages to all ranks follow one another, each in the link's latency at least.
    """
    time, units = LinkTime(), 1.0
    for num, link in _levels(ranks, hardware):
        others = (num - 1) * units
        rate = hardware.link_rate(link)
        transfer = num_bytes * others / ranks.num * _seconds_per_byte(link, hardware, rate)
        latency = math.ceil(math.log2(num)) * link.latency_us * 1e-6
        if link == hardware.inter:
            latency = max(0.0, others * link.latency_us * 1e-6 - transfer)
        time += LinkTime(transfer, latency + rate.launch_us * 1e-6)
        units *= num
    return time


def send(num_bytes: float, link: Link, hardware: Hardware) -> LinkTime:
    """Return the time of one message between two devices."""
    rate = hardware.link_rate(link)
    latency = link.latency_us + rate.launch_us
    return LinkTime(num_bytes * _seconds_per_byte(link, hardware, rate), latency * 1e-6)


Axis = Literal["data", "tensor", "pipe", "context", "expert", "expert data", "shard", "replicate"]
"""A set of ranks that exchange: `data` has all that reduce the gradients of one shard, over data and context
ranks; `expert data` those that reduce the gradients of the same experts. Of the data ranks, `shard` has those
that FSDP divides weights over, and `replicate` those that hold the same ones."""


def axis_ranks(replica: Replica, axis: Axis, cluster: ClusterSpec, hardware: Hardware) -> RankPlacement:
    """Return the placement of ranks along an axis where it spans most machines."""
    return _axis_ranks(replica.layout, replica.role, replica.workers, axis, cluster, _rack_size(hardware))


@lru_cache(maxsize=4096)
def _axis_ranks(
    layout: Layout,
    role: str,
    workers: tuple[int, ...],
    axis: Axis,
    cluster: ClusterSpec,
    rack_size: int | None,
) -> RankPlacement:
    """Return the placement of an axis. A search asks for the same ones again and again."""
    lines = axis_lines(layout, role, workers, axis)
    if workers == tuple(range(workers[0], workers[0] + len(workers))):
        # Lines that begin at the same place of a machine, or of a rack, are placed alike.
        lines = axis_lines(layout, role, workers, axis, alike=rack_size or cluster.devices_per_node)
    return max(
        (RankPlacement.counted(line, cluster, rack_size) for line in lines),
        key=lambda r: (r.racks, r.machines, -r.per_machine),
        default=RankPlacement(),
    )


def axis_lines(
    layout: Layout, role: str, workers: Sequence[int], axis: Axis, *, alike: int | None = None
) -> Iterator[Sequence[int]]:
    """Yield the workers of each line of ranks along an axis; none for size 1.

    One line is enough of those whose first workers differ by a multiple of `alike`; None: all lines.
    """
    copies = layout.copy_stride(rank_order(role))
    size, stride = {
        "data": (layout.num_copies, copies),
        "tensor": (layout.tensor, 1),
        "pipe": (layout.pipe, layout.pipe_stride(rank_order(role))),
        "context": (layout.context, layout.tensor),
        "expert": (layout.expert, copies),
        "expert data": (layout.num_expert_copies, copies * layout.expert),
        "shard": (layout.fsdp_size, copies),
        "replicate": (layout.replicate, copies * layout.fsdp_size),
    }[axis]
    if size == 1:
        return
    seen = set()
    for block in range(0, layout.world, stride * size):
        for rank in range(block, block + stride):
            place = workers[rank] % alike if alike else rank
            if place not in seen:
                seen.add(place)
                yield workers[rank : rank + stride * size : stride]
        if len(seen) == alike:
            return


def _rack_size(hardware: Hardware) -> int | None:
    """Return the devices of a rack; None if there are no racks."""
    return hardware.device.rack.devices if hardware.device.rack else None


def _seconds_per_byte(link: Link, hardware: Hardware, rate: LinkRate) -> float:
    """Return the inverse of the rate that programs reach on a link.

    A link between machines is no faster than that within them: devices reach both over the same bus.
    """
    reached = link.gb_per_s * rate.share
    if link not in (hardware.intra, hardware.host):
        reached = min(reached, hardware.intra.gb_per_s * hardware.link_rate(hardware.intra).share)
    return 1 / (1e9 * reached)


def _levels(ranks: RankPlacement, hardware: Hardware) -> Iterator[tuple[float, Link]]:
    """Yield the numbers of ranks, machines and racks that exchange, where they are several, and the link."""
    if ranks.per_machine > 1:
        yield ranks.per_machine, hardware.intra
    if ranks.machines > ranks.racks:
        yield ranks.machines / ranks.racks, hardware.within_rack
    if ranks.racks > 1:
        yield ranks.racks, hardware.inter
